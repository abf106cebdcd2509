// Experts that a folder packs in MXFP4: unpacked as transformers does, whatever range is read.
#include "io/unpacked/mxfp4_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "unit/io/temporary_folder.h"
#include "unit/io/tensors_in_memory.h"

namespace tessera::mxfp4_tensors_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::read_bfloat16;
using testing::value_of_bfloat16;

/// Of bytes; counts what is read of blocks.
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

// Naive: they are most of the elements, and float32 tensors beside them are taken for wider than
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
  EXPECT_THAT(refusal(packed), HasSubstr("found no tensor 'X_scales'"));
  packed->add("X_scales", DType::kUInt8, {E, R, G + 1}, bytes);
  EXPECT_THAT(refusal(packed), AllOf(HasSubstr("X_scales"), HasSubstr("[3, 5, 3]"),
                                     HasSubstr("expected [3, 5, 2]")));
  packed->add("X_scales", DType::kUInt8, {E, R, G, 1}, bytes);
  EXPECT_THAT(refusal(packed), HasSubstr("found shape [3, 5, 2, 1]"));
  packed->add("X_scales", DType::kInt8, {E, R, G}, bytes);
  EXPECT_THAT(refusal(packed), AllOf(HasSubstr("X_scales"), HasSubstr("found dtype int8")));
  packed->add("X_scales", DType::kUInt8, {E, R, G}, bytes);
  EXPECT_NO_THROW(Mxfp4Tensors{packed});
  packed->add("X_blocks", DType::kUInt8, {E, R, G, 15}, bytes);
  EXPECT_THAT(refusal(packed), AllOf(HasSubstr("X_blocks"), HasSubstr("[3, 5, 2, 15]")));
  packed->add("X_blocks", DType::kUInt8, {16}, bytes);
  EXPECT_THAT(refusal(packed), HasSubstr("found shape [16], expected [experts, rows, groups, 16]"));
  packed->add("X_blocks", DType::kBFloat16, {E, R, G, 16}, bytes);
  EXPECT_THAT(refusal(packed), AllOf(HasSubstr("X_blocks"), HasSubstr("found dtype bfloat16")));
  packed->add("X_blocks", DType::kUInt8, {E, R, G, 16}, bytes);
  packed->add("X", DType::kBFloat16, {E, 32 * G, R}, {});
  EXPECT_THAT(refusal(packed), HasSubstr("found the tensor 'X' beside 'X_blocks'"));
  auto scales = std::make_shared<Packed>();
  scales->add("X_scales", DType::kUInt8, {E, R, G}, bytes);
  EXPECT_THAT(refusal(scales), HasSubstr("found no tensor 'X_blocks'"));
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
    EXPECT_THAT(error_of(ErrorKind::kFormat,
                         [&] {
                           read_bfloat16(Mxfp4Tensors(with(static_cast<std::uint8_t>(scale),
                                                           static_cast<std::uint8_t>(byte))),
                                         "X", 0, 1);
                         }),
                AllOf(HasSubstr("X_scales"), HasSubstr("expert 0")))
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
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { says_mxfp4("[", "config.json"); }),
              HasSubstr("config.json"));
}

}  // namespace
}  // namespace tessera::mxfp4_tensors_test
