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

}  // namespace tessera::test
