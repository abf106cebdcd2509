#include "nn/mlp.h"

#include <ATen/ops/silu.h>

#include "nn/cpu/dispatch.h"
#include "nn/cpu/functions.h"

namespace tessera::nn {

at::Tensor swiglu_composite(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return cpu::has_kernels(gate) && up.scalar_type() == gate.scalar_type()
             ? cpu::swiglu(gate, up)
             : swiglu_composite(gate, up);
}

Mlp::Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias) {
  const auto projection = [&](const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, std::make_shared<Linear>(in, out, bias));
  };
  gate_proj_ = projection("gate_proj", hidden_size, intermediate_size);
  up_proj_ = projection("up_proj", hidden_size, intermediate_size);
  down_proj_ = projection("down_proj", intermediate_size, hidden_size);
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return down_proj_->forward(swiglu(gate_proj_->forward(x), up_proj_->forward(x)));
}

}  // namespace tessera::nn
