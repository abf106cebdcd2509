// Matrices that a folder has in blocks of eight bits: each element times its block's factor, in
// bfloat16, whatever range is read. convert_test.py compares with PyTorch's own eight-bit dtype.
#include "io/unpacked/fp8_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "unit/io/temporary_folder.h"
#include "unit/io/tensors_in_memory.h"

namespace tessera::fp8_tensors_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::read_bfloat16;
using testing::TensorsInMemory;
using testing::value_of_bfloat16;

constexpr std::int64_t kRows = 7, kColumns = 10;
constexpr Fp8Block kBlock{3, 4};  // 3 x 3 of them, those at the edges smaller

struct Drawn {
  std::shared_ptr<TensorsInMemory> packed = std::make_shared<TensorsInMemory>();
  std::vector<std::uint8_t> codes;
  std::vector<float> factors;
};

Drawn drawn() {
  std::mt19937_64 random(3);
  Drawn all;
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    auto code = static_cast<std::uint8_t>(random());
    if ((code & 127U) == 127U) code = 0;  // NaN
    all.codes.push_back(code);
  }
  std::uniform_real_distribution<float> factor(0.0001F, 0.01F);
  for (int i = 0; i < 9; ++i) all.factors.push_back(factor(random));
  all.packed->add("x.weight", DType::kFloat8E4M3, {kRows, kColumns}, all.codes);
  all.packed->add("x.weight_scale_inv", DType::kFloat32, {3, 3}, all.factors);
  all.packed->add("norm.weight", DType::kBFloat16, {2}, std::vector<std::uint16_t>{1, 2});
  return all;
}

/// By the definition: a sign, four bits of exponent (bias 7), three of mantissa.
double value_of(std::uint8_t code) {
  const int exponent = code / 8 % 16;
  const double mantissa = code % 8 / 8.0;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1 + mantissa, exponent - 7);
  return code < 128 ? size : -size;
}

TEST(Fp8Tensors, EveryElementIsItsCodeTimesTheFactorOfItsBlock) {
  const Drawn all = drawn();
  const Fp8Tensors source(all.packed, kBlock);
  ASSERT_EQ(source.tensors().size(), 2U) << "factors are not shown";
  EXPECT_EQ(*source.find("x.weight"),
            (SourceTensor{
                DType::kBFloat16, {kRows, kColumns}, DType::kBFloat16, true, DType::kFloat8E4M3}));
  const auto found = read_bfloat16(source, "x.weight", 0, kRows * kColumns);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < kColumns; ++column) {
      const auto at = static_cast<std::size_t>(row * kColumns + column);
      const float factor = all.factors[static_cast<std::size_t>(row / 3 * 3 + column / 4)];
      const auto exact = static_cast<float>(value_of(all.codes[at])) * factor;
      // Half a step of bfloat16's eight digits.
      EXPECT_LE(std::abs(value_of_bfloat16(found[at]) - exact), std::abs(exact) / 256)
          << row << " " << column;
    }
  }
  EXPECT_EQ(read_bfloat16(source, "norm.weight", 0, 2), (std::vector<std::uint16_t>{1, 2}));
}

TEST(Fp8Tensors, HalvesAreRoundedToEven) {
  const auto packed = std::make_shared<TensorsInMemory>();
  packed->add("x", DType::kFloat8E4M3, {1, 2}, std::vector<std::uint8_t>{0x38, 0xB8});  // 1, -1
  // 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6.
  for (const auto& [factor, even] : {std::pair{1.00390625F, 1.0F}, {1.01171875F, 1.015625F}}) {
    packed->add("x_scale_inv", DType::kFloat32, {1, 1}, std::vector<float>{factor});
    const auto found = read_bfloat16(Fp8Tensors(packed, {128, 128}), "x", 0, 2);
    EXPECT_EQ(value_of_bfloat16(found[0]), even);
    EXPECT_EQ(value_of_bfloat16(found[1]), -even);
  }
}

TEST(Fp8Tensors, AnyRangeIsThatPart) {
  const Drawn all = drawn();
  const Fp8Tensors source(all.packed, kBlock);
  const auto whole = read_bfloat16(source, "x.weight", 0, kRows * kColumns);
  for (std::int64_t begin = 0; begin <= kRows * kColumns; ++begin) {
    for (std::int64_t end = begin; end <= kRows * kColumns; ++end) {
      const std::vector<std::uint16_t> expected(whole.begin() + begin, whole.begin() + end);
      ASSERT_EQ(read_bfloat16(source, "x.weight", begin, end), expected);
    }
  }
}

TEST(Fp8Tensors, WhatDoesNotBelongTogetherIsRefusedByName) {
  const auto refusal = [](const auto& change) {
    const Drawn all = drawn();
    change(*all.packed);
    return error_of(ErrorKind::kFormat, [&] { Fp8Tensors(all.packed, kBlock); });
  };
  const std::vector<float> nine(9), six(6);
  EXPECT_THAT(refusal([&](auto& packed) {
                packed.add("x.weight_scale_inv", DType::kFloat32, {3, 2}, six);
              }),
              AllOf(HasSubstr("x.weight_scale_inv"), HasSubstr("found the shape [3, 2]"),
                    HasSubstr("expected [3, 3]")));
  EXPECT_THAT(refusal([&](auto& packed) {
                packed.add("x.weight_scale_inv", DType::kFloat64, {3, 3}, nine);
              }),
              HasSubstr("found the dtype float64, expected float32"));
  EXPECT_THAT(
      refusal([&](auto& packed) { packed.add("y_scale_inv", DType::kFloat32, {3, 3}, nine); }),
      AllOf(HasSubstr("y_scale_inv"), HasSubstr("alone")));
  EXPECT_THAT(refusal([&](auto& packed) {
                packed.add("y", DType::kFloat8E4M3, {1, 1}, std::vector<std::uint8_t>{1});
              }),
              HasSubstr("found no tensor 'y_scale_inv'"));
}

TEST(Fp8Tensors, WhatIsNotFiniteIsRefusedWithItsPlace) {
  for (const auto& [code, factor] : {std::pair<std::uint8_t, float>{0x7F, 1.0F}, {0x7E, 1e38F}}) {
    const auto packed = std::make_shared<TensorsInMemory>();
    packed->add("x", DType::kFloat8E4M3, {2, 2}, std::vector<std::uint8_t>{0, 0, 0, code});
    packed->add("x_scale_inv", DType::kFloat32, {1, 1}, std::vector<float>{factor});
    const Fp8Tensors source(packed, {128, 128});
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { read_bfloat16(source, "x", 0, 4); }),
                HasSubstr("row 1, column 1"));
  }
}

TEST(Fp8Tensors, AFactorBelowZeroIsRefusedByName) {
  const auto packed = std::make_shared<TensorsInMemory>();
  packed->add("x", DType::kFloat8E4M3, {1, 2}, std::vector<std::uint8_t>{0, 0x38});
  packed->add("x_scale_inv", DType::kFloat32, {1, 2}, std::vector<float>{0.0F, -0.5F});
  const Fp8Tensors source(packed, {1, 1});
  for (int i = 0; i < 2; ++i) {  // and again: what was refused is not held
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { read_bfloat16(source, "x", 0, 1); }),
                HasSubstr("'x_scale_inv': found the factor -0.5 of block 1"));
  }
}

TEST(Fp8Tensors, TheConfigSaysTheBlock) {
  EXPECT_EQ(fp8_block(R"({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                          "weight_block_size": [128, 64]}})",
                      "c"),
            (Fp8Block{128, 64}));
  EXPECT_EQ(fp8_block(R"({"quantization_config": {"quant_method": "mxfp4"}})", "c"), std::nullopt);
  EXPECT_EQ(fp8_block("{}", "c"), std::nullopt);
  for (const char* size : {"", R"(, "weight_block_size": [128])",
                           R"(, "weight_block_size": [0, 1])", R"(, "weight_block_size": "128")"}) {
    const std::string text =
        std::string(R"({"quantization_config": {"quant_method": "fp8")") + size + "}}";
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { fp8_block(text, "config.json"); }),
                HasSubstr("weight_block_size"));
  }
}

}  // namespace
}  // namespace tessera::fp8_tensors_test
