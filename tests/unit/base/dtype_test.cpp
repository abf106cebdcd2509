#include "tessera/dtype.h"

#include <gtest/gtest.h>

#include <vector>

#include "tessera/error.h"

namespace tessera::dtype_test {
namespace {

const std::vector<DType> kAll = {
    DType::kFloat64,    DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
    DType::kFloat8E5M2, DType::kInt64,   DType::kInt32,   DType::kInt16,    DType::kInt8,
    DType::kUInt64,     DType::kUInt32,  DType::kUInt16,  DType::kUInt8,    DType::kBool};

TEST(DType, WordsAreParsedBackWhateverTheCase) {
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
  try {
    promote(DType::kFloat8E4M3, DType::kFloat32);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kContract);
    EXPECT_NE(std::string(error.what()).find("float8_e4m3fn with float32"), std::string::npos);
  }
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

}  // namespace
}  // namespace tessera::dtype_test
