#include "tessera/dtype.h"

#include <cmath>

#include "base/split_float.h"
#include "support/test.h"

namespace tessera::dtype_test {
namespace {

const std::vector<DType> kAll = {
    DType::kFloat64,    DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
    DType::kFloat8E5M2, DType::kInt64,   DType::kInt32,   DType::kInt16,    DType::kInt8,
    DType::kUInt64,     DType::kUInt32,  DType::kUInt16,  DType::kUInt8,    DType::kBool};

TEST(DType, WordsAreParsedBackInAnyCase) {
  for (const DType dtype : kAll) EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
  EXPECT_EQ(parse_dtype("BFloat16"), DType::kBFloat16);
  EXPECT_EQ(parse_dtype("FLOAT32"), DType::kFloat32);
}

TEST(DType, OtherWordsGiveNone) {
  for (const char* word : {"", "auto", "bf16", "float", "float320", " float32"}) {
    EXPECT_EQ(parse_dtype(word), std::nullopt) << word;
  }
}

TEST(DType, NumbersOutsideTheEnumAreRefused) {
  EXPECT_THROW(size_of(static_cast<DType>(200)), Error);
  EXPECT_THROW(to_string(static_cast<DType>(200)), Error);
}

TEST(DType, HalfTypesPromoteToFloat32) {
  EXPECT_EQ(promote(DType::kFloat16, DType::kBFloat16), DType::kFloat32);
  EXPECT_EQ(promote(DType::kBFloat16, DType::kFloat32), DType::kFloat32);
  EXPECT_EQ(promote(DType::kInt64, DType::kBFloat16), DType::kBFloat16);
  EXPECT_EQ(promote(DType::kInt8, DType::kUInt8), DType::kInt16);
}

TEST(DType, Float8WithAnythingElseIsRefusedByName) {
  EXPECT_REFUSED(kContract, promote(DType::kFloat8E4M3, DType::kFloat32),
                 "float8_e4m3fn with float32");
  EXPECT_EQ(promote(DType::kFloat8E4M3, DType::kFloat8E4M3), DType::kFloat8E4M3);
}

TEST(DType, RepresentsIsAPartialOrder) {
  for (const DType a : kAll) {
    EXPECT_TRUE(represents(a, a));
    for (const DType b : kAll) {
      EXPECT_FALSE(a != b && represents(a, b) && represents(b, a));
      for (const DType c : kAll) {
        if (represents(a, b) && represents(b, c)) {
          EXPECT_TRUE(represents(a, c))
              << to_string(a) << " " << to_string(b) << " " << to_string(c);
        }
      }
    }
  }
}

TEST(DType, RepresentsKnowsThePairsThatAreOftenConfused) {
  EXPECT_FALSE(represents(DType::kBFloat16, DType::kFloat16));
  EXPECT_FALSE(represents(DType::kFloat16, DType::kBFloat16));
  EXPECT_TRUE(represents(DType::kFloat32, DType::kFloat16));
  EXPECT_FALSE(represents(DType::kFloat32, DType::kInt32));
  EXPECT_TRUE(represents(DType::kFloat64, DType::kInt32));
  EXPECT_FALSE(represents(DType::kInt64, DType::kUInt64));
  EXPECT_TRUE(represents(DType::kInt64, DType::kUInt32));
  EXPECT_TRUE(represents(DType::kFloat16, DType::kFloat8E5M2));
  EXPECT_FALSE(represents(DType::kFloat8E5M2, DType::kFloat8E4M3));
}

TEST(Encoding, PayloadOfAPlainDtypeIsItsBytes) {
  EXPECT_EQ(Encoding{DType::kBFloat16}.payload_bytes(7), 14);
  EXPECT_EQ(Encoding{}.payload_bytes(0), 0);
}

// A float32 as a bfloat16 and a remainder: nothing is lost, and the bfloat16 is the nearest one.

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

TEST(SplitFloat, NotANumberStaysOneForAnyPayload) {
  EXPECT_EQ(split(float_of(0x7F800001U)).rounded, 0x7FC0U);  // cut off, it would be infinity
  EXPECT_EQ(split(float_of(0xFFFFFFFFU)).rounded, 0xFFC0U);  // rounded up, it would be zero
}

}  // namespace
}  // namespace tessera::dtype_test
