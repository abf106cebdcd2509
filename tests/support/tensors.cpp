#include "support/tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/random.h"
#include "support/place.h"

namespace tessera::test {

::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() && !b.defined()) return ::testing::AssertionSuccess();
  if (!a.defined() || !b.defined()) return ::testing::AssertionFailure() << "one is undefined";
  if (a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure() << a.scalar_type() << " against " << b.scalar_type();
  }
  if (a.sizes() != b.sizes())
    return ::testing::AssertionFailure() << a.sizes() << " against " << b.sizes();
  const auto one = a.detach().cpu().contiguous();
  const auto other = b.detach().cpu().contiguous();
  const auto bytes_of = [](const at::Tensor& tensor) {
    return std::span(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
  };
  // A loop over bytes takes long where tests are not optimized.
  if (one.nbytes() == 0 ||
      std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  const auto found = std::ranges::mismatch(bytes_of(one), bytes_of(other));
  const auto element =
      (found.in1 - bytes_of(one).begin()) / static_cast<std::ptrdiff_t>(one.element_size());
  const auto value = [&](const at::Tensor& tensor) {
    return tensor.flatten()[element].to(at::kDouble).item<double>();
  };
  return ::testing::AssertionFailure()
         << "element " << element << " of " << one.numel() << ": " << value(one) << " against "
         << value(other) << ", largest difference "
         << (one.to(at::kDouble) - other.to(at::kDouble)).abs().max().item<double>();
}

at::Tensor seeded(std::uint64_t seed, at::IntArrayRef sizes, at::ScalarType dtype) {
  auto values = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  fill_normal(values.data_ptr<float>(), 0, values.numel(), seed, "test", 0.0F, 0.5F);
  return here(values.to(dtype));
}

double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor wide = expected.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

}  // namespace tessera::test
