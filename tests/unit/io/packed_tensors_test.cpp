// Matrices that a folder has in blocks of eight bits: each element times its block's factor, in
// bfloat16, for any range that is read. convert_test.py compares with PyTorch's own eight-bit
// dtype.

#include <cmath>
#include <random>

#include "io/unpacked/fp8_tensors.h"
#include "io/unpacked/mxfp4_tensors.h"
#include "support/temporary_folder.h"
#include "unit/io/tensors_in_memory.h"

namespace tessera::packed_tensors_test {
namespace {

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
              Says("x.weight_scale_inv", "found the shape [3, 2]", "expected [3, 3]"));
  EXPECT_THAT(refusal([&](auto& packed) {
                packed.add("x.weight_scale_inv", DType::kFloat64, {3, 3}, nine);
              }),
              Says("found the dtype float64, expected float32"));
  EXPECT_THAT(
      refusal([&](auto& packed) { packed.add("y_scale_inv", DType::kFloat32, {3, 3}, nine); }),
      Says("y_scale_inv", "alone"));
  EXPECT_THAT(refusal([&](auto& packed) {
                packed.add("y", DType::kFloat8E4M3, {1, 1}, std::vector<std::uint8_t>{1});
              }),
              Says("found no tensor 'y_scale_inv'"));
}

TEST(Fp8Tensors, WhatIsNotFiniteIsRefusedWithItsPlace) {
  for (const auto& [code, factor] : {std::pair<std::uint8_t, float>{0x7F, 1.0F}, {0x7E, 1e38F}}) {
    const auto packed = std::make_shared<TensorsInMemory>();
    packed->add("x", DType::kFloat8E4M3, {2, 2}, std::vector<std::uint8_t>{0, 0, 0, code});
    packed->add("x_scale_inv", DType::kFloat32, {1, 1}, std::vector<float>{factor});
    const Fp8Tensors source(packed, {128, 128});
    EXPECT_REFUSED(kFormat, read_bfloat16(source, "x", 0, 4), "row 1, column 1");
  }
}

TEST(Fp8Tensors, AFactorBelowZeroIsRefusedByName) {
  const auto packed = std::make_shared<TensorsInMemory>();
  packed->add("x", DType::kFloat8E4M3, {1, 2}, std::vector<std::uint8_t>{0, 0x38});
  packed->add("x_scale_inv", DType::kFloat32, {1, 2}, std::vector<float>{0.0F, -0.5F});
  const Fp8Tensors source(packed, {1, 1});
  for (int i = 0; i < 2; ++i) {  // and again: what was refused is not held
    EXPECT_REFUSED(kFormat, read_bfloat16(source, "x", 0, 1),
                   "'x_scale_inv': found the factor -0.5 of block 1");
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
    EXPECT_REFUSED(kFormat, fp8_block(text, "config.json"), "weight_block_size");
  }
}

// Experts that a folder packs in MXFP4: unpacked as transformers does, for any range that is read.

/// A source of bytes; counts what is read of blocks.
class Packed final : public testing::TensorsInMemory {
 public:
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           const std::vector<std::uint8_t>& bytes) {
    TensorsInMemory::add(name, dtype, std::move(shape), bytes);
  }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override {
    TensorsInMemory::read(name, begin, end, out);
    if (name.ends_with("_blocks")) {
      ++reads;
      most = std::max(most, out.size());
    }
  }
  mutable int reads = 0;
  mutable std::size_t most = 0;
};

constexpr std::int64_t E = 3, R = 5, G = 2;

/// X [E, 32 G, R] of random codes under scales that bfloat16 holds.
std::shared_ptr<Packed> random_packed(std::mt19937_64& random, const std::string& name = "X") {
  std::vector<std::uint8_t> blocks(E * R * G * 16);
  std::vector<std::uint8_t> scales(E * R * G);
  for (auto& byte : blocks) byte = static_cast<std::uint8_t>(random());
  for (auto& scale : scales) scale = static_cast<std::uint8_t>(random() % 252);
  auto packed = std::make_shared<Packed>();
  packed->add(name + "_blocks", DType::kUInt8, {E, R, G, 16}, blocks);
  packed->add(name + "_scales", DType::kUInt8, {E, R, G}, scales);
  packed->add("bias", DType::kBFloat16, {2}, {1, 2, 3, 4});
  return packed;
}

/// By the definition, one element at a time: e2m1 has a sign, two bits of exponent (bias 1) and one
/// of mantissa, and numbers below 1 without the leading one.
float by_definition(const Packed& packed, std::int64_t e, std::int64_t in, std::int64_t row) {
  const std::int64_t block = (e * R + row) * G + in / 32;
  std::uint8_t byte = 0;
  std::uint8_t scale = 0;
  packed.read("X_blocks", block * 16 + in % 32 / 2, 0, std::as_writable_bytes(std::span(&byte, 1)));
  packed.read("X_scales", block, 0, std::as_writable_bytes(std::span(&scale, 1)));
  const int code = in % 2 == 0 ? byte % 16 : byte / 16;
  const int exponent = code / 2 % 4;
  const int mantissa = code % 2;
  const double size =
      exponent == 0 ? 0.5 * mantissa : std::ldexp(1.0 + 0.5 * mantissa, exponent - 1);
  return static_cast<float>((code < 8 ? 1 : -1) * std::ldexp(size, scale - 127));
}

TEST(Mxfp4Tensors, EveryElementIsItsCodeTimesItsScaleTransposed) {
  std::mt19937_64 random(1);
  const auto packed = random_packed(random);
  const Mxfp4Tensors source(packed);
  ASSERT_EQ(source.tensors().size(), 2U);
  EXPECT_EQ(*source.find("X"),
            (SourceTensor{DType::kBFloat16, {E, 32 * G, R}, DType::kBFloat16, true}));
  const auto found = read_bfloat16(source, "X", 0, E * 32 * G * R);
  for (std::int64_t e = 0; e < E; ++e) {
    for (std::int64_t in = 0; in < 32 * G; ++in) {
      for (std::int64_t row = 0; row < R; ++row) {
        const auto index = static_cast<std::size_t>((e * 32 * G + in) * R + row);
        const float expected = by_definition(*packed, e, in, row);
        ASSERT_EQ(value_of_bfloat16(found[index]), expected) << e << " " << in << " " << row;
        ASSERT_EQ(std::signbit(value_of_bfloat16(found[index])), std::signbit(expected));
      }
    }
  }
  EXPECT_EQ(read_bfloat16(source, "bias", 0, 2), (std::vector<std::uint16_t>{0x0201, 0x0403}));
}

TEST(Mxfp4Tensors, AnyRangeIsThatPartAndNoMoreThanAnExpertIsHeld) {
  std::mt19937_64 random(2);
  const auto packed = random_packed(random);
  const Mxfp4Tensors source(packed);
  const std::int64_t numel = E * 32 * G * R;
  const auto whole = read_bfloat16(source, "X", 0, numel);
  EXPECT_EQ(packed->reads, E);
  EXPECT_EQ(packed->most, static_cast<std::size_t>(R * G * 16));
  for (int i = 0; i < 200; ++i) {
    const auto begin = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(numel));
    const auto end =
        begin + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(numel - begin + 1));
    const auto part = read_bfloat16(source, "X", begin, end);
    ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin));
  }
  packed->reads = 0;
  read_bfloat16(source, "X", 0, 1);
  for (std::int64_t i = 0; i < 32 * G * R; ++i) read_bfloat16(source, "X", i, i + 1);
  EXPECT_EQ(packed->reads, 1) << "an expert is unpacked once for all its parts";
}

// Naive: they are most of the elements, and float32 tensors next to them are taken for wider than
// usual.
TEST(Mxfp4Tensors, DoNotCountForTheDtypeOfMostElements) {
  std::mt19937_64 random(3);
  const auto packed = random_packed(random);
  packed->add("norm", DType::kFloat32, {3}, std::vector<std::uint8_t>(12));
  EXPECT_EQ(Mxfp4Tensors(packed).bulk_dtype(), DType::kFloat32);
}

std::string refusal(const std::shared_ptr<Packed>& packed) {
  return error_of(ErrorKind::kFormat, [&] { Mxfp4Tensors{packed}; });
}

TEST(Mxfp4Tensors, HalvesThatDoNotBelongTogetherAreNamed) {
  const std::vector<std::uint8_t> bytes(E * R * G * 16);
  auto packed = std::make_shared<Packed>();
  packed->add("X_blocks", DType::kUInt8, {E, R, G, 16}, bytes);
  EXPECT_THAT(refusal(packed), Says("found no tensor 'X_scales'"));
  packed->add("X_scales", DType::kUInt8, {E, R, G + 1}, bytes);
  EXPECT_THAT(refusal(packed), Says("X_scales", "[3, 5, 3]", "expected [3, 5, 2]"));
  packed->add("X_scales", DType::kUInt8, {E, R, G, 1}, bytes);
  EXPECT_THAT(refusal(packed), Says("found shape [3, 5, 2, 1]"));
  packed->add("X_scales", DType::kInt8, {E, R, G}, bytes);
  EXPECT_THAT(refusal(packed), Says("X_scales", "found dtype int8"));
  packed->add("X_scales", DType::kUInt8, {E, R, G}, bytes);
  EXPECT_NO_THROW(Mxfp4Tensors{packed});
  packed->add("X_blocks", DType::kUInt8, {E, R, G, 15}, bytes);
  EXPECT_THAT(refusal(packed), Says("X_blocks", "[3, 5, 2, 15]"));
  packed->add("X_blocks", DType::kUInt8, {16}, bytes);
  EXPECT_THAT(refusal(packed), Says("found shape [16], expected [experts, rows, groups, 16]"));
  packed->add("X_blocks", DType::kBFloat16, {E, R, G, 16}, bytes);
  EXPECT_THAT(refusal(packed), Says("X_blocks", "found dtype bfloat16"));
  packed->add("X_blocks", DType::kUInt8, {E, R, G, 16}, bytes);
  packed->add("X", DType::kBFloat16, {E, 32 * G, R}, {});
  EXPECT_THAT(refusal(packed), Says("found the tensor 'X' next to 'X_blocks'"));
  auto scales = std::make_shared<Packed>();
  scales->add("X_scales", DType::kUInt8, {E, R, G}, bytes);
  EXPECT_THAT(refusal(scales), Says("found no tensor 'X_blocks'"));
}

// bfloat16 has the exponents of float32: 6 * 2^125 is the largest of them all that it holds, and
// nothing is too small.
TEST(Mxfp4Tensors, ValuesThatBfloat16CannotHoldAreRefusedWhereTheyAreRead) {
  const auto with = [](std::uint8_t scale, std::uint8_t byte) {
    auto packed = std::make_shared<Packed>();
    packed->add("X_blocks", DType::kUInt8, {1, 1, 1, 16}, std::vector<std::uint8_t>(16, byte));
    packed->add("X_scales", DType::kUInt8, {1, 1, 1}, {scale});
    return packed;
  };
  EXPECT_EQ(value_of_bfloat16(read_bfloat16(Mxfp4Tensors(with(252, 0x77)), "X", 0, 1)[0]),
            0x1.8p127F);
  EXPECT_EQ(value_of_bfloat16(read_bfloat16(Mxfp4Tensors(with(0, 0x91)), "X", 0, 2)[0]), 0x1p-128F);
  EXPECT_EQ(value_of_bfloat16(read_bfloat16(Mxfp4Tensors(with(0, 0x91)), "X", 0, 2)[1]),
            -0x1p-128F);
  EXPECT_EQ(value_of_bfloat16(read_bfloat16(Mxfp4Tensors(with(254, 0x33)), "X", 0, 1)[0]),
            0x1.8p127F);
  for (const auto& [scale, byte] : {std::pair{253, 0x77}, {254, 0x40}, {254, 0x04}, {255, 0x00}}) {
    EXPECT_REFUSED(kFormat,
                   read_bfloat16(Mxfp4Tensors(with(static_cast<std::uint8_t>(scale),
                                                   static_cast<std::uint8_t>(byte))),
                                 "X", 0, 1),
                   "X_scales", "expert 0")
        << scale;
  }
}

TEST(Mxfp4Tensors, OnlyAConfigThatSaysSoIsTakenForPacked) {
  EXPECT_TRUE(says_mxfp4(R"({"quantization_config": {"quant_method": "mxfp4"}})", "config.json"));
  for (const char* text :
       {"{}", R"({"quantization_config": null})",
        R"({"quantization_config": {"quant_method": "fp8"}})",
        R"({"quantization_config": {"quant_method": 4}})", R"({"quantization_config": "mxfp4"})"}) {
    EXPECT_FALSE(says_mxfp4(text, "config.json")) << text;
  }
  EXPECT_REFUSED(kFormat, says_mxfp4("[", "config.json"), "config.json");
}

}  // namespace
}  // namespace tessera::packed_tensors_test
