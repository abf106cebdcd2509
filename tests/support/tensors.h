// Tensors of tests: drawn from a seed, and compared.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace tessera::test {

/// Compares bit for bit, dtype included: a NaN is the same as itself, and 0 is not -0. Strides and
/// devices may differ; two undefined tensors are the same.
::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b);

/// Values that depend on the seed only, not on libtorch's process-wide generator; here().
at::Tensor seeded(std::uint64_t seed, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

/// |found - expected| / |expected| in fp64.
double relative_error(const at::Tensor& found, const at::Tensor& expected);

/// The most that 1 - cosine of a gradient may be where `bound` is twice the worst recorded, which is
/// one draw of the noise: of four elements or fewer nothing averages, and another draw is up to three
/// times as far.
inline double direction_bound(const at::Tensor& gradient, double bound) {
  return gradient.numel() <= 4 ? 3 * bound : bound;
}

}  // namespace tessera::test
