#include "io/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "unit/io/temporary_folder.h"

namespace tessera::safetensors_header_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A file's first bytes: the length, the JSON text.
std::string with_length(const std::string& json, std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((length >> (8 * i)) & 0xFFU);
  return bytes + json;
}

SafetensorsHeader parse_bytes(const std::string& bytes, std::int64_t file_size) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes)), file_size, "x.safetensors");
}

SafetensorsHeader parse(const std::string& json, std::int64_t data_bytes) {
  const std::string bytes = with_length(json, json.size());
  return parse_bytes(bytes, static_cast<std::int64_t>(bytes.size()) + data_bytes);
}

std::string refusal(const std::string& json, std::int64_t data_bytes) {
  return testing::error_of(ErrorKind::kFormat, [&] { parse(json, data_bytes); });
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(SafetensorsHeader, TensorsComeInFileOrderWithAbsoluteOffsets) {
  const std::string json = R"({"b":)" + entry("F32", "[2,3]", "[4,28]") + R"(,"a":)" +
                           entry("BF16", "[2]", "[0,4]") + R"(,"__metadata__":{"format":"pt"}}  )";
  const SafetensorsHeader header = parse(json, 28);
  const auto data = static_cast<std::int64_t>(8 + json.size());
  ASSERT_EQ(header.tensors.size(), 2U);
  EXPECT_EQ(
      header.tensors[0],
      (TensorInfo{
          .name = "a", .dtype = DType::kBFloat16, .shape = {2}, .begin = data, .end = data + 4}));
  EXPECT_EQ(header.tensors[1], (TensorInfo{.name = "b",
                                           .dtype = DType::kFloat32,
                                           .shape = {2, 3},
                                           .begin = data + 4,
                                           .end = data + 28}));
  EXPECT_EQ(header.find("b"), &header.tensors[1]);
  EXPECT_EQ(header.find("b")->numel(), 6);
  EXPECT_EQ(header.find("c"), nullptr);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, EveryDtypeNameIsRead) {
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
        DType::kFloat8E5M2, DType::kInt64, DType::kInt32, DType::kInt16, DType::kInt8,
        DType::kUInt64, DType::kUInt32, DType::kUInt16, DType::kUInt8, DType::kBool}) {
    const std::int64_t bytes = 3 * size_of(dtype);
    const std::string json =
        R"({"t":)" +
        entry(std::string(safetensors_name(dtype)), "[3]", "[0," + std::to_string(bytes) + "]") +
        "}";
    EXPECT_EQ(parse(json, bytes).tensors.at(0).dtype, dtype) << safetensors_name(dtype);
  }
}

TEST(SafetensorsHeader, ScalarsAndEmptyTensorsAreRead) {
  const std::string json = R"({"scalar":)" + entry("F32", "[]", "[0,4]") + R"(,"empty":)" +
                           entry("F32", "[0,5]", "[4,4]") + R"(,"first":)" +
                           entry("I64", "[3,0]", "[0,0]") + "}";
  const SafetensorsHeader header = parse(json, 4);
  EXPECT_EQ(header.find("scalar")->numel(), 1);
  EXPECT_EQ(header.find("empty")->numel(), 0);
  EXPECT_EQ(header.find("first")->numel(), 0);
}

TEST(SafetensorsHeader, FileWithoutTensorsIsRead) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse(R"({"__metadata__":{}})", 0).tensors.empty());
}

TEST(SafetensorsHeader, EveryTruncationIsRefused) {
  const std::string json = R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}";
  const std::string whole = with_length(json, json.size()) + std::string(8, 'x');
  for (std::size_t size = 0; size < whole.size(); ++size) {
    testing::error_of(ErrorKind::kFormat,
                      [&] { parse_bytes(whole.substr(0, size), static_cast<std::int64_t>(size)); });
  }
  EXPECT_NO_THROW(parse_bytes(whole, static_cast<std::int64_t>(whole.size())));
}

TEST(SafetensorsHeader, LyingLengthsAreRefused) {
  const std::string json = "{}";
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{99'999'999}, std::uint64_t{100'000'001},
        std::uint64_t{1} << 63U, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    EXPECT_THAT(
        testing::error_of(ErrorKind::kFormat, [&] { parse_bytes(with_length(json, length), 10); }),
        HasSubstr("found a header length of " + std::to_string(length)));
  }
  // Shorter than the text: the rest of the text would be data.
  testing::error_of(ErrorKind::kFormat, [&] { parse_bytes(with_length("{}  ", 1), 12); });
  testing::error_of(ErrorKind::kFormat, [&] { parse_bytes(with_length("{}", 0), 10); });
}

TEST(SafetensorsHeader, HugeLengthIsRefusedBeforeItIsBelieved) {
  // The file claims to be large enough; only the cap stands between it and a huge allocation.
  EXPECT_THAT(
      testing::error_of(
          ErrorKind::kFormat,
          [] { parse_bytes(with_length("{}", std::uint64_t{1} << 40U), std::int64_t{1} << 50U); }),
      HasSubstr("expected at most 100000000"));
}

TEST(SafetensorsHeader, OffsetsOutsideTheFileAreRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}", 4), HasSubstr("'a'"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("F32", "[2]", "[8,0]") + "}", 8), HasSubstr("[8, 0]"));
  EXPECT_THAT(
      refusal(R"({"a":)" + entry("U8", "[1]", "[9223372036854775807,9223372036854775807]") + "}",
              8),
      HasSubstr("inside the file"));
}

TEST(SafetensorsHeader, NumbersThatAreNotSizesAreRefused) {
  for (const std::string number :
       {"-1", "1.0", "1e2", "9223372036854775808", "18446744073709551615", "18446744073709551616",
        "1e400", "NaN", "null", "true", "\"1\"", "[1]", "{}", "-9223372036854775809"}) {
    SCOPED_TRACE(number);
    refusal(R"({"a":)" + entry("U8", "[" + number + "]", "[0,1]") + "}", 1);
    refusal(R"({"a":)" + entry("U8", "[1]", "[0," + number + "]") + "}", 1);
    refusal(R"({"a":)" + entry("U8", "[1]", "[" + number + ",1]") + "}", 1);
    if (number == "[1]") continue;  // a good shape
    refusal(R"({"a":)" + entry("U8", number, "[0,1]") + "}", 1);
    refusal(R"({"a":)" + entry("U8", "[1]", number) + "}", 1);
  }
}

TEST(SafetensorsHeader, OverflowingShapesAreRefused) {
  const std::string half = "4294967296";  // 2^32
  for (const std::string& shape :
       {"[" + half + "," + half + "]", "[" + half + ",2147483648]", "[0," + half + "," + half + "]",
        std::string("[4611686018427387904,2]"), std::string("[9223372036854775807]"),
        "[" + half + "," + half + ",0]"}) {
    EXPECT_THAT(refusal(R"({"a":)" + entry("F32", shape, "[0,0]") + "}", 0),
                AllOf(HasSubstr("'a'"), HasSubstr("2^63")))
        << shape;
  }
}

TEST(SafetensorsHeader, TooManyDimsAreRefused) {
  std::string shape = "[1";
  for (int i = 1; i < 64; ++i) shape += ",1";
  EXPECT_EQ(parse(R"({"a":)" + entry("U8", shape + "]", "[0,1]") + "}", 1).tensors[0].shape.size(),
            64U);
  refusal(R"({"a":)" + entry("U8", shape + ",1]", "[0,1]") + "}", 1);
}

TEST(SafetensorsHeader, SizeThatIsNotTheShapesIsRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("F32", "[2,3]", "[0,12]") + "}", 12),
              AllOf(HasSubstr("found 12 bytes of 'a'"), HasSubstr("expected 24 for F32 [2, 3]")));
}

TEST(SafetensorsHeader, OverlapIsRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[4]", "[2,6]") + "}",
                      6),
              HasSubstr("'b' overlaps"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[4]", "[0,4]") + "}",
                      4),
              HasSubstr("overlaps"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[0]", "[2,2]") + "}",
                      4),
              HasSubstr("'b' overlaps"));
}

TEST(SafetensorsHeader, GapsAreRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[1,2]") + "}", 2), HasSubstr("gap"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[0,1]") + R"(,"b":)" +
                          entry("U8", "[1]", "[2,3]") + "}",
                      3),
              HasSubstr("'b' leaves a gap"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[0,1]") + "}", 2),
              HasSubstr("found 2 bytes of data, expected the 1"));
  EXPECT_THAT(refusal("{}", 1), HasSubstr("found 1 bytes of data, expected the 0"));
}

TEST(SafetensorsHeader, UnknownDtypeIsNamed) {
  for (const std::string dtype : {"F4", "f32", "", "FLOAT", "F32 ", "F8_E8M0"}) {
    EXPECT_THAT(refusal(R"({"w":)" + entry(dtype, "[1]", "[0,1]") + "}", 1),
                AllOf(HasSubstr("'" + dtype + "'"), HasSubstr("'w'")));
  }
}

TEST(SafetensorsHeader, DuplicateKeysAreRefused) {
  const std::string a = R"("a":)" + entry("U8", "[1]", "[0,1]");
  EXPECT_THAT(refusal("{" + a + "," + a + "}", 1), HasSubstr("'a' twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), HasSubstr("twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", 0), HasSubstr("'k' twice"));
  for (const std::string again : {R"("dtype":"U8")", R"("shape":[1])", R"("data_offsets":[0,1])"}) {
    EXPECT_THAT(
        refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],)" + again + "}}", 1),
        HasSubstr("twice"));
  }
}

TEST(SafetensorsHeader, IncompleteOrForeignEntriesAreRefused) {
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[1]}})", 1), HasSubstr("lacks data_offsets"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1), HasSubstr("lacks shape"));
  EXPECT_THAT(refusal(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1), HasSubstr("lacks dtype"));
  EXPECT_THAT(refusal(R"({"a":{}})", 1), HasSubstr("'a'"));
  for (const std::string json : {R"({"a":1})",
                                 R"({"a":"x"})",
                                 R"({"a":null})",
                                 R"({"a":[1]})",
                                 R"({"a":true})",
                                 R"({"a":{"dtype":["U8"]}})",
                                 R"({"a":{"dtype":{}}})",
                                 R"({"a":{"shape":{}}})",
                                 R"({"a":{"other":1}})",
                                 R"({"a":{"shape":"U8"}})",
                                 R"({"a":{"data_offsets":[0,1,2]}})",
                                 R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})",
                                 R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[]}})",
                                 R"({"__metadata__":{"k":1}})",
                                 R"({"__metadata__":{"k":{}}})",
                                 R"({"__metadata__":[]})",
                                 R"({"__metadata__":"x"})",
                                 R"({"__metadata__":null})",
                                 "[]",
                                 "1",
                                 "null",
                                 "",
                                 " {}",
                                 "{",
                                 "{]",
                                 "}",
                                 "{}{}",
                                 "{}x",
                                 "{\"a\"",
                                 "{\"a\":",
                                 "{\"\xff\":1}",
                                 "{\"\\ud800\":1}",
                                 "\xEF\xBB\xBF{}",
                                 "{,}",
                                 "{\"a\":{\"dtype\":\"U8\",}}"}) {
    SCOPED_TRACE(json);
    refusal(json, 1);
  }
}

TEST(SafetensorsHeader, DeepNestingIsRefusedWithoutStack) {
  constexpr std::size_t kDepth = 100'000;
  std::string objects;
  for (std::size_t i = 0; i < kDepth; ++i) objects += "{\"a\":";
  refusal(objects, 0);
  refusal("{\"a\":" + std::string(kDepth, '['), 0);
  refusal("{\"a\":{\"shape\":" + std::string(kDepth, '[') + std::string(kDepth, ']') + "}}", 0);
}

TEST(SafetensorsHeader, MessagesShowHostileNamesEscapedAndCut) {
  const std::string name(1'000'000, 'n');
  const std::string cut = refusal(R"({")" + name + R"(":1})", 0);
  EXPECT_LT(cut.size(), 1000U);
  EXPECT_THAT(cut, HasSubstr("nnn...'"));
  EXPECT_THAT(refusal("{\"\\u001b[2J\":1}", 0), HasSubstr("'\\x1b[2J'"));
}

TEST(SafetensorsHeader, TwoHundredThousandTensorsAreReadQuickly) {
  // Quadratic work anywhere would exceed the test's time limit.
  std::string json = "{";
  constexpr int kTensors = 200'000;
  for (int i = 0; i < kTensors; ++i) {
    if (i > 0) json += ',';
    json += "\"t" + std::to_string(i) +
            "\":" + entry("U8", "[1]", "[" + std::to_string(i) + "," + std::to_string(i + 1) + "]");
  }
  EXPECT_EQ(parse(json + "}", kTensors).tensors.size(), static_cast<std::size_t>(kTensors));
}

}  // namespace
}  // namespace tessera::safetensors_header_test
