#include "nn/mlp.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::nn {

Mlp::Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias,
         const TensorRegion& region, Gate gate, GateAndUp first)
    : region_(region), gate_(gate) {
  const auto add = [&](const char* name, std::int64_t out, LinearPlacement placement) {
    return register_module(name,
                           std::make_shared<Linear>(hidden_size, out, bias, std::move(placement)));
  };
  if (first == GateAndUp::kFused) {
    TESSERA_INVARIANT(gate == Gate::kSilu, "gate and up in one with another gate than SiLU");
    const std::int64_t whole = region.size() * intermediate_size;
    gate_up_proj_ =
        add("gate_up_proj", 2 * intermediate_size, side_by_side(region, {whole, whole}));
  } else {
    if (gate != Gate::kNone) {
      gate_proj_ = add("gate_proj", intermediate_size, column_parallel(region));
    }
    up_proj_ = add("up_proj", intermediate_size, column_parallel(region));
  }
  down_proj_ = register_module("down_proj", std::make_shared<Linear>(intermediate_size, hidden_size,
                                                                     bias, row_parallel(region)));
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return down_proj_->forward_into(
      region_, *this, {region_.enter(x)},
      [this](const std::vector<at::Tensor>& in) { return inner(in[0]); });
}

at::Tensor Mlp::addend(const at::Tensor& x) {
  TESSERA_INVARIANT(region_.size() == 1 || !down_proj_->bias.defined(), "a bias added n times");
  return down_proj_->forward(inner(x));
}

ProductInput Mlp::inner(const at::Tensor& x) {
  using Kind = ProductInput::Kind;
  if (gate_up_proj_) return {Kind::kSwigluHalves, gate_up_proj_->forward(x)};
  if (gate_ == Gate::kNone) return relu_squared(up_proj_->forward(x));
  at::Tensor gate = gate_proj_->forward(x);
  at::Tensor up = up_proj_->forward(x);
  if (gate_ == Gate::kGelu) return geglu(gate, up);
  return {Kind::kSwiglu, std::move(gate), std::move(up)};
}

GegluMlp::GegluMlp(std::int64_t hidden_size, std::int64_t intermediate_size, WeightName weight_name,
                   const TensorRegion& region)
    : region_(region) {
  const Projection in{hidden_size, intermediate_size, weight_name, column_parallel(region)};
  gate_proj_ = add_projection(*this, "gate_proj", in);
  up_proj_ = add_projection(*this, "up_proj", in);
  down_proj_ = add_projection(*this, "down_proj",
                              {intermediate_size, hidden_size, weight_name, row_parallel(region)});
}

at::Tensor GegluMlp::forward(const at::Tensor& x) {
  return down_proj_->forward_into(
      region_, *this, {region_.enter(x)}, [this](const std::vector<at::Tensor>& in) {
        return geglu(gate_proj_->forward(in[0]), up_proj_->forward(in[0]));
      });
}

}  // namespace tessera::nn
