#include <string>

#include "base/random.h"
#include "dist/ranks.h"

namespace tessera::test {

at::Tensor seeded(std::uint64_t seed, at::IntArrayRef sizes, at::ScalarType dtype) {
  auto values = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  fill_normal(values.data_ptr<float>(), 0, values.numel(), seed, "test", 0.0F, 0.5F);
  return here(values.to(dtype));
}

}  // namespace tessera::test
