// A module with each thing that a dict of its state has to get right.
#pragma once

#include "support/plain.h"

namespace tessera::test {

/// Parameters of two dtypes and uneven sizes, one frozen, one with two names ("tied" is the first),
/// and buffers.
class Everything : public torch::nn::Module {
 public:
  explicit Everything(std::uint64_t seed, at::ScalarType narrow_dtype = at::kBFloat16) {
    affine = register_module("affine", std::make_shared<Affine>(seed, 7, 13));
    narrow = register_module("narrow", std::make_shared<Affine>(seed + 1, 13, 5, narrow_dtype));
    frozen = register_parameter("frozen", seeded(seed + 2, {3, 3, 3}), /*requires_grad=*/false);
    single = register_parameter("single", seeded(seed + 3, {}));
    tied = register_parameter("tied", narrow->weight);
    count =
        register_buffer("count", here(at::full({2}, static_cast<std::int64_t>(seed), at::kLong)));
    mean = affine->register_buffer("mean", seeded(seed + 4, {7}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return narrow->forward(affine->forward((x - affine->named_buffers()["mean"]))) * single;
  }
  std::shared_ptr<Affine> affine, narrow;
  at::Tensor frozen, single, tied, count, mean;
};

}  // namespace tessera::test
