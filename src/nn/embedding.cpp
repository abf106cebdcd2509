#include "nn/embedding.h"

#include <ATen/ops/embedding.h>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "nn/parameter.h"
#include "nn/vocab_parallel.h"

namespace tessera::nn {

at::Tensor embedding_composite(const at::Tensor& ids, const at::Tensor& weight,
                               std::optional<std::int64_t> padding) {
  return at::embedding(weight, ids, padding.value_or(-1));
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding) {
  return cpu::has_kernels(weight) ? cpu::embedding(ids, weight, padding)
                                  : embedding_composite(ids, weight, padding);
}

Embedding::Embedding(std::int64_t vocabulary, std::int64_t size,
                     std::optional<std::int64_t> padding, const TensorRegion& region)
    : region_(region), padding_(padding) {
  weight = register_parameter("weight", empty_parameter({vocabulary, size}));
  declare("weight", region.column());
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  return region_.leave(vocab_parallel_embedding(ids, weight, region_.axis(), padding_));
}

}  // namespace tessera::nn
