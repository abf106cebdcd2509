// divide_into: the one division and the one rounding of a step, against the nearest value found the
// slow way.
#include "support/quotient.h"

#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "support/test.h"

namespace tessera::kernels::quotient_test {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

at::Tensor quotient(const at::Tensor& sum, double factor, at::ScalarType dtype) {
  auto result = at::full_like(sum, 77.0, sum.options().dtype(dtype));
  divide_into(result, sum, factor);
  return result;
}

/// Values over many magnitudes, with all mantissa bits in use; the last ones are special.
at::Tensor values(at::ScalarType dtype) {
  constexpr std::int64_t kCount = 4099;
  auto all = at::empty({kCount}, at::kDouble);
  auto* data = all.mutable_data_ptr<double>();
  std::uint64_t state = 12345;
  for (std::int64_t i = 0; i < kCount; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const double unit = static_cast<double>(state >> 11) / static_cast<double>(1ULL << 53) - 0.5;
    data[i] = std::ldexp(unit, static_cast<int>(state >> 59) - 16);
  }
  const double special[] = {0.0, -0.0, 1e30, -1e-30, 6e-8};
  for (std::int64_t i = 0; i < 5; ++i) data[i] = special[i];
  return all.to(dtype);
}

TEST(Quotient, IsTheNearestValueForEveryPairOfDtypesAndFactor) {
  for (const auto from : kDtypes) {
    for (const auto to : kDtypes) {
      for (const double factor : {1.0, 2.0, 3.0, 6.0, 257.0, 0.1, 1.0 / 3.0}) {
        const auto sum = values(from);
        const auto found = quotient(sum, factor, to);
        const auto expected = test::divided(sum, factor, to);
        EXPECT_TRUE(at::equal(found, expected))
            << from << " to " << to << " over " << factor << ": largest difference "
            << (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
        EXPECT_TRUE(at::equal(found.signbit(), sum.signbit()));
      }
    }
  }
}

// Naive: a cast from fp64 to bf16 by way of fp32 makes a tie of what lies above it, and 1 of
// 1 + 2^-7.
TEST(Quotient, AValueJustAboveATieIsRoundedUp) {
  const double above = 1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
  const auto sum = at::full({3}, above, at::kDouble);
  EXPECT_EQ(quotient(sum, 1.0, at::kBFloat16)[1].item<double>(), 1.0 + 1.0 / 128);
  EXPECT_EQ(quotient(sum * -3.0, 3.0, at::kBFloat16)[1].item<double>(), -1.0 - 1.0 / 128);
}

// Naive: the factor rounded to the sum's dtype, as a tensor of it: 257 is 256 in bf16.
TEST(Quotient, TheFactorIsNotRoundedToANarrowSum) {
  const auto sum = at::full({3}, 1024.0, at::kBFloat16);
  EXPECT_EQ(quotient(sum, 257.0, at::kBFloat16)[0].item<double>(), 3.984375) << "not 1024 / 256";
}

// Naive: a quotient in a narrow sum's dtype that is widened afterwards.
TEST(Quotient, ANarrowSumIsDividedInAWiderFinalDtype) {
  EXPECT_EQ(quotient(at::ones({2}, at::kBFloat16), 3.0, at::kFloat)[0].item<float>(), 1.0F / 3.0F);
}

TEST(Quotient, WhatIsNotFiniteStaysSo) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  for (const auto from : kDtypes) {
    for (const auto to : kDtypes) {
      const auto found =
          quotient(at::tensor({kInfinity, -kInfinity, std::nan("")}).to(from), 3.0, to);
      EXPECT_EQ(found[0].item<double>(), kInfinity);
      EXPECT_EQ(found[1].item<double>(), -kInfinity);
      EXPECT_TRUE(std::isnan(found[2].item<double>()));
    }
  }
}

TEST(Quotient, MayBeFormedInPlaceAndOfNothing) {
  for (const auto dtype : kDtypes) {
    const auto sum = values(dtype);
    const auto expected = quotient(sum, 3.0, dtype);
    divide_into(sum, sum, 3.0);
    EXPECT_TRUE(at::equal(sum, expected));
    EXPECT_EQ(quotient(at::empty({0}, dtype), 3.0, at::kBFloat16).numel(), 0);
  }
}

}  // namespace
}  // namespace tessera::kernels::quotient_test
