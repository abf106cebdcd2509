#include "nn/geglu.h"

#include <ATen/ops/gelu.h>

namespace tessera::nn {

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::gelu(gate, "tanh") * up;
}

GegluMlp::GegluMlp(std::int64_t hidden_size, std::int64_t intermediate_size,
                   WeightName weight_name) {
  const Projection in{hidden_size, intermediate_size, weight_name};
  gate_proj_ = add_projection(*this, "gate_proj", in);
  up_proj_ = add_projection(*this, "up_proj", in);
  down_proj_ = add_projection(*this, "down_proj", {intermediate_size, hidden_size, weight_name});
}

at::Tensor GegluMlp::forward(const at::Tensor& x) {
  return down_proj_->forward(geglu(gate_proj_->forward(x), up_proj_->forward(x)));
}

}  // namespace tessera::nn
