#include "nn/mlp.h"

#include <ATen/ops/silu.h>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "tessera/error.h"

namespace tessera::nn {

at::Tensor swiglu_composite(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return cpu::has_kernels(gate) && up.scalar_type() == gate.scalar_type()
             ? cpu::swiglu(gate, up)
             : swiglu_composite(gate, up);
}

Mlp::Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias,
         const TensorRegion& region)
    : region_(region) {
  const auto first = [&](const char* name) {
    return register_module(name, std::make_shared<Linear>(hidden_size, intermediate_size, bias,
                                                          column_parallel(region)));
  };
  gate_proj_ = first("gate_proj");
  up_proj_ = first("up_proj");
  down_proj_ = register_module("down_proj", std::make_shared<Linear>(intermediate_size, hidden_size,
                                                                     bias, row_parallel(region)));
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return down_proj_->forward_into(region_, inner(region_.enter(x)));
}

at::Tensor Mlp::addend(const at::Tensor& x) {
  TESSERA_INVARIANT(region_.size() == 1 || !down_proj_->bias.defined(), "a bias added n times");
  return down_proj_->forward(inner(x));
}

at::Tensor Mlp::inner(const at::Tensor& x) {
  return swiglu(gate_proj_->forward(x), up_proj_->forward(x));
}

}  // namespace tessera::nn
