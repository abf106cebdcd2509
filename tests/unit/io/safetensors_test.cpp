#include "io/safetensors.h"

#include <sys/stat.h>

#include <array>
#include <cstring>
#include <random>

#include "io/safetensors_header.h"
#include "support/temporary_folder.h"

namespace tessera::safetensors_test {
namespace {

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine() & 0xFFU);
  return bytes;
}

bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

TEST(SafetensorsWriter, RoundTripKeepsBytesMetadataAndShapes) {
  const TemporaryFolder folder;
  const std::vector<TensorSpec> specs{{"w\"\\\n\xC3\xA9", DType::kBFloat16, {3, 5}},
                                      {"scalar", DType::kFloat64, {}},
                                      {"empty", DType::kFloat32, {0, 7}},
                                      {"flags", DType::kBool, {3}},
                                      {"ids", DType::kInt64, {2, 2}}};
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"q", "\"\xE2\x82\xAC\""}};
  for (const TensorOrder order : {TensorOrder::kAligned, TensorOrder::kGiven}) {
    SafetensorsWriter writer(folder / "a.safetensors", specs, metadata, order);
    unsigned seed = 0;
    for (const TensorSpec& spec : specs) {
      const auto size = static_cast<std::size_t>(writer.header().find(spec.name)->size_bytes());
      writer.write(spec.name, random_bytes(size, seed++));
    }
    writer.finish();
    const SafetensorsFile file(folder / "a.safetensors");
    EXPECT_EQ(file.header().metadata, metadata);
    EXPECT_EQ(file.header().tensors, writer.header().tensors);
    seed = 0;
    for (const TensorSpec& spec : specs) {
      EXPECT_EQ(file.info(spec.name).shape, spec.shape);
      EXPECT_TRUE(same(file.bytes(spec.name), random_bytes(file.bytes(spec.name).size(), seed++)))
          << spec.name;
    }
  }
}

TEST(SafetensorsWriter, AlignedOrderAlignsEveryTensorAndGivenOrderKeepsIt) {
  const TemporaryFolder folder;
  const std::vector<TensorSpec> specs{{"b", DType::kUInt8, {3}},
                                      {"z", DType::kFloat32, {1}},
                                      {"a", DType::kFloat32, {1}},
                                      {"d", DType::kFloat64, {1}}};
  const SafetensorsWriter aligned(folder / "a", specs);
  std::string order;
  for (const TensorInfo& tensor : aligned.header().tensors) {
    order += tensor.name;
    EXPECT_EQ(tensor.begin % size_of(tensor.dtype), 0) << tensor.name;
  }
  EXPECT_EQ(order, "dazb");
  const SafetensorsWriter given(folder / "b", specs, {}, TensorOrder::kGiven);
  order.clear();
  for (const TensorInfo& tensor : given.header().tensors) order += tensor.name;
  EXPECT_EQ(order, "bzad");
}

TEST(SafetensorsWriter, RangesInAnyOrderMakeTheTensor) {
  const TemporaryFolder folder;
  const auto bytes = random_bytes(40, 7);
  SafetensorsWriter writer(folder / "a", {{"w", DType::kFloat32, {10}}});
  const std::span<const std::byte> all(bytes);
  writer.write_range("w", 6, all.subspan(24, 16));
  writer.write_range("w", 0, all.first(4));
  writer.write_range("w", 3, {});
  writer.write_range("w", 1, all.subspan(4, 20));
  writer.finish();
  const SafetensorsFile file(folder / "a");
  EXPECT_TRUE(same(file.bytes("w"), all));
  EXPECT_TRUE(same(file.range("w", 2, 5), all.subspan(8, 12)));
  EXPECT_TRUE(file.range("w", 10, 10).empty());
}

TEST(SafetensorsWriter, UnfinishedFileNeverHasItsName) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "a", {{"w", DType::kUInt8, {4}}});
    writer.write_range("w", 0, random_bytes(2, 0));
    EXPECT_FALSE(std::filesystem::exists(folder / "a"));
    EXPECT_REFUSED(kUsage, writer.finish(), "'w' was written up to byte 2, expected 4");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, ElementsWrittenTwiceOrNeverAreRefused) {
  const TemporaryFolder folder;
  SafetensorsWriter twice(folder / "a", {{"w", DType::kUInt8, {4}}});
  twice.write_range("w", 0, random_bytes(3, 0));
  twice.write_range("w", 2, random_bytes(2, 0));
  EXPECT_REFUSED(kUsage, twice.finish(), "twice");
  SafetensorsWriter hole(folder / "b", {{"w", DType::kUInt8, {4}}});
  hole.write_range("w", 3, random_bytes(1, 0));
  EXPECT_REFUSED(kUsage, hole.finish(), "not at all");
}

TEST(SafetensorsWriter, WrongCallsAreRefused) {
  const TemporaryFolder folder;
  const auto make = [&](std::vector<TensorSpec> specs) {
    return error_of(ErrorKind::kUsage, [&] { SafetensorsWriter(folder / "a", std::move(specs)); });
  };
  EXPECT_THAT(make({{"w", DType::kUInt8, {1}}, {"w", DType::kUInt8, {1}}}), Says("twice"));
  EXPECT_THAT(make({{"__metadata__", DType::kUInt8, {1}}}), Says("keeps for itself"));
  EXPECT_THAT(make({{"\xff", DType::kUInt8, {1}}}), Says("UTF-8"));
  EXPECT_THAT(make({{"w", DType::kUInt8, {-1}}}), Says("negative"));
  EXPECT_THAT(make({{"w", DType::kFloat32, {std::int64_t{1} << 62}}}), Says("2^63"));
  EXPECT_THAT(make({{"v", DType::kUInt8, {std::int64_t{1} << 62}},
                    {"w", DType::kUInt8, {std::int64_t{1} << 62}}}),
              Says("2^63"));
  SafetensorsWriter writer(folder / "a", {{"w", DType::kFloat32, {4}}});
  EXPECT_REFUSED(kUsage, writer.write("v", {}));
  EXPECT_REFUSED(kUsage, writer.write("w", random_bytes(4, 0)));
  EXPECT_REFUSED(kUsage, writer.write_range("w", 0, random_bytes(3, 0)));
  EXPECT_REFUSED(kUsage, writer.write_range("w", -1, random_bytes(4, 0)));
  EXPECT_REFUSED(kUsage, writer.write_range("w", 4, random_bytes(4, 0)));
  EXPECT_REFUSED(kUsage, writer.write_range("w", 5, {}));
}

TEST(SafetensorsWriter, UnwritableFolderIsAnIoError) {
  const TemporaryFolder folder;
  EXPECT_REFUSED(kIo, SafetensorsWriter(folder / "none/a", {{"w", DType::kUInt8, {1}}}), "none/a");
}

TEST(SafetensorsFile, RangesOutsideATensorAreRefused) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "a",
                           {{"v", DType::kFloat32, {4}}, {"w", DType::kFloat32, {4}}});
  writer.write("v", random_bytes(16, 0));
  writer.write("w", random_bytes(16, 1));
  writer.finish();
  const SafetensorsFile file(folder / "a");
  EXPECT_REFUSED(kFormat, file.bytes("u"), "'u'");
  const std::vector<std::pair<std::int64_t, std::int64_t>> outside{
      {-1, 2}, {3, 2}, {0, 5}, {5, 5}, {0, std::int64_t{1} << 62}};
  for (const auto& [begin, end] : outside) {
    error_of(ErrorKind::kUsage, [&, b = begin, e = end] { file.range("v", b, e); });
  }
}

TEST(SafetensorsFile, MissingFileFolderAndPipeAreIoErrors) {
  const TemporaryFolder folder;
  EXPECT_REFUSED(kIo, SafetensorsFile(folder / "none.safetensors"), "none.safetensors", "errno 2");
  EXPECT_REFUSED(kIo, SafetensorsFile{folder.path()});
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_REFUSED(kIo, SafetensorsFile(folder / "pipe"));
}

TEST(SafetensorsFile, EmptyFileIsAFormatErrorThatNamesIt) {
  const TemporaryFolder folder;
  EXPECT_REFUSED(kFormat, SafetensorsFile(folder.write("empty.safetensors", "")),
                 "empty.safetensors");
}

TEST(SafetensorsFile, ReferenceFilesAreRead) {
  const std::filesystem::path data = TESSERA_TEST_DATA;
  const SafetensorsFile model(data / "qwen3-mixed" / "model.safetensors");
  EXPECT_EQ(model.info("model.norm.weight").dtype, DType::kFloat32);
  EXPECT_EQ(model.info("lm_head.weight").dtype, DType::kBFloat16);
  EXPECT_EQ(model.info("lm_head.weight").shape, (std::vector<std::int64_t>{128, 32}));
  EXPECT_EQ(model.header().metadata.at("format"), "pt");
  const SafetensorsFile reference(data / "qwen3-fp32" / "reference.safetensors");
  // The file's own tokens: [B, T] int64 below the vocabulary of 128.
  const TensorInfo& ids = reference.info("input_ids");
  ASSERT_EQ(ids.dtype, DType::kInt64);
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    std::int64_t id = -1;
    std::memcpy(&id, reference.range("input_ids", i, i + 1).data(), sizeof(id));
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 128);
  }
}

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
  return error_of(ErrorKind::kFormat, [&] { parse(json, data_bytes); });
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
    EXPECT_REFUSED(kFormat, parse_bytes(whole.substr(0, size), static_cast<std::int64_t>(size)))
        << size;
  }
  EXPECT_NO_THROW(parse_bytes(whole, static_cast<std::int64_t>(whole.size())));
}

TEST(SafetensorsHeader, LyingLengthsAreRefused) {
  const std::string json = "{}";
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{99'999'999}, std::uint64_t{100'000'001},
        std::uint64_t{1} << 63U, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    EXPECT_REFUSED(kFormat, parse_bytes(with_length(json, length), 10),
                   "found a header length of " + std::to_string(length));
  }
  // Shorter than the text: the rest of the text would be data.
  error_of(ErrorKind::kFormat, [&] { parse_bytes(with_length("{}  ", 1), 12); });
  EXPECT_REFUSED(kFormat, parse_bytes(with_length("{}", 0), 10));
}

TEST(SafetensorsHeader, HugeLengthIsRefusedBeforeItIsBelieved) {
  // The file claims to be large enough; only the cap stands between it and a huge allocation.
  EXPECT_THAT(
      error_of(
          ErrorKind::kFormat,
          [] { parse_bytes(with_length("{}", std::uint64_t{1} << 40U), std::int64_t{1} << 50U); }),
      Says("expected at most 100000000"));
}

TEST(SafetensorsHeader, OffsetsOutsideTheFileAreRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}", 4), Says("'a'"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("F32", "[2]", "[8,0]") + "}", 8), Says("[8, 0]"));
  EXPECT_THAT(
      refusal(R"({"a":)" + entry("U8", "[1]", "[9223372036854775807,9223372036854775807]") + "}",
              8),
      Says("inside the file"));
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
    EXPECT_THAT(refusal(R"({"a":)" + entry("F32", shape, "[0,0]") + "}", 0), Says("'a'", "2^63"))
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
              Says("found 12 bytes of 'a'", "expected 24 for F32 [2, 3]"));
}

TEST(SafetensorsHeader, OverlapIsRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[4]", "[2,6]") + "}",
                      6),
              Says("'b' overlaps"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[4]", "[0,4]") + "}",
                      4),
              Says("overlaps"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" +
                          entry("U8", "[0]", "[2,2]") + "}",
                      4),
              Says("'b' overlaps"));
}

TEST(SafetensorsHeader, GapsAreRefused) {
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[1,2]") + "}", 2), Says("gap"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[0,1]") + R"(,"b":)" +
                          entry("U8", "[1]", "[2,3]") + "}",
                      3),
              Says("'b' leaves a gap"));
  EXPECT_THAT(refusal(R"({"a":)" + entry("U8", "[1]", "[0,1]") + "}", 2),
              Says("found 2 bytes of data, expected the 1"));
  EXPECT_THAT(refusal("{}", 1), Says("found 1 bytes of data, expected the 0"));
}

TEST(SafetensorsHeader, UnknownDtypeIsNamed) {
  for (const std::string dtype : {"F4", "f32", "", "FLOAT", "F32 ", "F8_E8M0"}) {
    EXPECT_THAT(refusal(R"({"w":)" + entry(dtype, "[1]", "[0,1]") + "}", 1),
                Says("'" + dtype + "'", "'w'"));
  }
}

TEST(SafetensorsHeader, DuplicateKeysAreRefused) {
  const std::string a = R"("a":)" + entry("U8", "[1]", "[0,1]");
  EXPECT_THAT(refusal("{" + a + "," + a + "}", 1), Says("'a' twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), Says("twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", 0), Says("'k' twice"));
  for (const std::string again : {R"("dtype":"U8")", R"("shape":[1])", R"("data_offsets":[0,1])"}) {
    EXPECT_THAT(
        refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],)" + again + "}}", 1),
        Says("twice"));
  }
}

TEST(SafetensorsHeader, IncompleteOrForeignEntriesAreRefused) {
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[1]}})", 1), Says("lacks data_offsets"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1), Says("lacks shape"));
  EXPECT_THAT(refusal(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1), Says("lacks dtype"));
  EXPECT_THAT(refusal(R"({"a":{}})", 1), Says("'a'"));
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
  EXPECT_THAT(cut, Says("nnn...'"));
  EXPECT_THAT(refusal("{\"\\u001b[2J\":1}", 0), Says("'\\x1b[2J'"));
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
}  // namespace tessera::safetensors_test
