#include "nn/embedding.h"

#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "nn/vocab_parallel.h"

namespace tessera::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kNoPadding = -1;

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& ids, const at::Tensor& weight,
                            std::int64_t padding) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({ids});
    ctx->saved_data["rows"] = weight.size(0);
    ctx->saved_data["padding"] = padding;
    return kernels::embedding(ids, weight, padding);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    return {at::Tensor(),
            kernels::embedding_backward(grads[0], ctx->get_saved_variables()[0],
                                        ctx->saved_data["rows"].toInt(),
                                        ctx->saved_data["padding"].toInt()),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding) {
  const std::int64_t row = padding.value_or(kNoPadding);
  return base::has_second_derivatives(weight) ? kernels::embedding(ids, weight, row)
                                              : EmbeddingFunction::apply(ids, weight, row);
}

Embedding::Embedding(std::int64_t vocabulary, std::int64_t size,
                     std::optional<std::int64_t> padding, const TensorRegion& region)
    : region_(region), padding_(padding) {
  weight = add_parameter("weight", {vocabulary, size},
                         {.layout = region.column(), .decay = DecayClass::kEmbedding});
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  return region_.leave(vocab_parallel_embedding(ids, weight, region_.axis(), padding_));
}

}  // namespace tessera::nn
