#include "nn/geglu.h"

#include <ATen/ops/gelu.h>

namespace tessera::nn {

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::gelu(gate, "tanh") * up;
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
  const at::Tensor all = region_.enter(x);
  return down_proj_->forward_into(region_, geglu(gate_proj_->forward(all), up_proj_->forward(all)));
}

}  // namespace tessera::nn
