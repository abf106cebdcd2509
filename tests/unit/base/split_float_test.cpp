// A float32 as a bfloat16 and a remainder: nothing is lost, and the bfloat16 is the nearest one.
#include "base/split_float.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::split_float_test {
namespace {

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
float bfloat16(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16U); }

/// Every upper half with lower halves around the borders of rounding.
template <class F>
void for_many_floats(const F& check) {
  for (std::uint32_t high = 0; high <= 0xFFFFU; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x1234U, 0x7FFFU, 0x8000U, 0x8001U, 0xABCDU, 0xFFFFU}) {
      check(high << 16U | low);
    }
  }
}

TEST(SplitFloat, ComesBackBitForBit) {
  for_many_floats([](std::uint32_t bits) {
    const float value = float_of(bits);
    const float back = join(split(value));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(back)) << std::hex << bits;
      ASSERT_EQ(std::signbit(back), std::signbit(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back), bits) << std::hex << bits;
    }
  });
}

TEST(SplitFloat, TheRoundedHalfIsTheNearestAndOfTwoTheOneAwayFromZero) {
  for_many_floats([](std::uint32_t bits) {
    const float value = float_of(bits);
    // Beyond the largest bfloat16 there is no neighbour to compare with.
    if (!std::isfinite(value) || std::abs(value) >= 0x1.fep127F) return;
    const auto inner = static_cast<std::uint16_t>(bits >> 16U);
    const auto outer = static_cast<std::uint16_t>(inner + 1U);  // further from zero
    const double to_inner = std::abs(double{value} - double{bfloat16(inner)});
    const double to_outer = std::abs(double{value} - double{bfloat16(outer)});
    const auto nearest = to_outer <= to_inner ? outer : inner;
    ASSERT_EQ(split(value).rounded, nearest) << std::hex << bits;
  });
}

TEST(SplitFloat, LargeFiniteValuesShowInfinityAndAreKept) {
  constexpr float kLargest = 0x1.fffffep127F;
  EXPECT_EQ(split(kLargest).rounded, 0x7F80U);
  EXPECT_EQ(join(split(kLargest)), kLargest);
  EXPECT_EQ(split(-kLargest).rounded, 0xFF80U);
}

TEST(SplitFloat, NotANumberStaysOneWhateverItsPayload) {
  EXPECT_EQ(split(float_of(0x7F800001U)).rounded, 0x7FC0U);  // cut off, it would be infinity
  EXPECT_EQ(split(float_of(0xFFFFFFFFU)).rounded, 0xFFC0U);  // rounded up, it would be zero
}

}  // namespace
}  // namespace tessera::split_float_test
