// Tensors of tests: drawn from a seed, and compared.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string_view>

namespace tessera::test {

/// Compares bit for bit, dtype included: a NaN is the same as itself, and 0 is not -0. Strides and
/// devices may differ; two undefined tensors are the same.
::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b);

/// Values that depend on the seed only, not on libtorch's process-wide generator; here().
at::Tensor seeded(std::uint64_t seed, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

/// |found - expected| / |expected| in fp64.
double relative_error(const at::Tensor& found, const at::Tensor& expected);

/// The most that 1 - cosine of the gradient of this parameter may be, where `bound` is twice the
/// worst recorded. A parameter that decays a state has four elements here: with independent errors
/// 1 - cosine is as chi-square of 3 degrees, of which 99.9 % lie below 6.9 medians, and the record
/// is one draw.
inline double direction_bound(std::string_view parameter, double bound) {
  const bool decays =
      parameter.ends_with(".A_log") || parameter.ends_with(".dt_bias") || parameter.ends_with(".D");
  return decays ? 3 * bound : bound;
}

}  // namespace tessera::test
