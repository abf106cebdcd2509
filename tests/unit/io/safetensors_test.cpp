#include "io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "unit/io/temporary_folder.h"

namespace tessera::safetensors_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

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
    EXPECT_THAT(error_of(ErrorKind::kUsage, [&] { writer.finish(); }),
                HasSubstr("'w' was written up to byte 2, expected 4"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, ElementsWrittenTwiceOrNeverAreRefused) {
  const TemporaryFolder folder;
  SafetensorsWriter twice(folder / "a", {{"w", DType::kUInt8, {4}}});
  twice.write_range("w", 0, random_bytes(3, 0));
  twice.write_range("w", 2, random_bytes(2, 0));
  EXPECT_THAT(error_of(ErrorKind::kUsage, [&] { twice.finish(); }), HasSubstr("twice"));
  SafetensorsWriter hole(folder / "b", {{"w", DType::kUInt8, {4}}});
  hole.write_range("w", 3, random_bytes(1, 0));
  EXPECT_THAT(error_of(ErrorKind::kUsage, [&] { hole.finish(); }), HasSubstr("not at all"));
}

TEST(SafetensorsWriter, WrongCallsAreRefused) {
  const TemporaryFolder folder;
  const auto make = [&](std::vector<TensorSpec> specs) {
    return error_of(ErrorKind::kUsage, [&] { SafetensorsWriter(folder / "a", std::move(specs)); });
  };
  EXPECT_THAT(make({{"w", DType::kUInt8, {1}}, {"w", DType::kUInt8, {1}}}), HasSubstr("twice"));
  EXPECT_THAT(make({{"__metadata__", DType::kUInt8, {1}}}), HasSubstr("keeps for itself"));
  EXPECT_THAT(make({{"\xff", DType::kUInt8, {1}}}), HasSubstr("UTF-8"));
  EXPECT_THAT(make({{"w", DType::kUInt8, {-1}}}), HasSubstr("negative"));
  EXPECT_THAT(make({{"w", DType::kFloat32, {std::int64_t{1} << 62}}}), HasSubstr("2^63"));
  EXPECT_THAT(make({{"v", DType::kUInt8, {std::int64_t{1} << 62}},
                    {"w", DType::kUInt8, {std::int64_t{1} << 62}}}),
              HasSubstr("2^63"));
  SafetensorsWriter writer(folder / "a", {{"w", DType::kFloat32, {4}}});
  error_of(ErrorKind::kUsage, [&] { writer.write("v", {}); });
  error_of(ErrorKind::kUsage, [&] { writer.write("w", random_bytes(4, 0)); });
  error_of(ErrorKind::kUsage, [&] { writer.write_range("w", 0, random_bytes(3, 0)); });
  error_of(ErrorKind::kUsage, [&] { writer.write_range("w", -1, random_bytes(4, 0)); });
  error_of(ErrorKind::kUsage, [&] { writer.write_range("w", 4, random_bytes(4, 0)); });
  error_of(ErrorKind::kUsage, [&] { writer.write_range("w", 5, {}); });
}

TEST(SafetensorsWriter, UnwritableFolderIsAnIoError) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(ErrorKind::kIo,
                       [&] { SafetensorsWriter(folder / "none/a", {{"w", DType::kUInt8, {1}}}); }),
              HasSubstr("none/a"));
}

TEST(SafetensorsFile, RangesOutsideATensorAreRefused) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "a",
                           {{"v", DType::kFloat32, {4}}, {"w", DType::kFloat32, {4}}});
  writer.write("v", random_bytes(16, 0));
  writer.write("w", random_bytes(16, 1));
  writer.finish();
  const SafetensorsFile file(folder / "a");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file.bytes("u"); }), HasSubstr("'u'"));
  const std::vector<std::pair<std::int64_t, std::int64_t>> outside{
      {-1, 2}, {3, 2}, {0, 5}, {5, 5}, {0, std::int64_t{1} << 62}};
  for (const auto& [begin, end] : outside) {
    error_of(ErrorKind::kUsage, [&, b = begin, e = end] { file.range("v", b, e); });
  }
}

TEST(SafetensorsFile, MissingFileFolderAndPipeAreIoErrors) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { SafetensorsFile(folder / "none.safetensors"); }),
              ::testing::AllOf(HasSubstr("none.safetensors"), HasSubstr("errno 2")));
  error_of(ErrorKind::kIo, [&] { SafetensorsFile{folder.path()}; });
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  error_of(ErrorKind::kIo, [&] { SafetensorsFile(folder / "pipe"); });
}

TEST(SafetensorsFile, EmptyFileIsAFormatErrorThatNamesIt) {
  const TemporaryFolder folder;
  EXPECT_THAT(
      error_of(ErrorKind::kFormat, [&] { SafetensorsFile(folder.write("empty.safetensors", "")); }),
      HasSubstr("empty.safetensors"));
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

}  // namespace
}  // namespace tessera::safetensors_test
