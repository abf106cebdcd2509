#include "io/hf_folder.h"

#include <nlohmann/json.hpp>
#include <random>

#include "io/label_index.h"
#include "io/safetensors.h"
#include "io/token_source.h"
#include "support/temporary_folder.h"
#include "tessera/log_level.h"

namespace tessera::hf_folder_test {
namespace {

namespace fs = std::filesystem;

/// A file with tensors of `dtype` and the given numbers of elements, all bytes zero.
void write_tensors(const fs::path& path, const std::vector<TensorSpec>& specs) {
  SafetensorsWriter writer(path, specs);
  for (const TensorInfo& tensor : writer.header().tensors) {
    writer.write(tensor.name,
                 std::vector<std::byte>(static_cast<std::size_t>(tensor.size_bytes())));
  }
  writer.finish();
}

/// A folder of two files that is in order; each test breaks one thing.
std::unique_ptr<TemporaryFolder> sharded_folder() {
  auto folder = std::make_unique<TemporaryFolder>();
  folder->write("config.json", "{}");
  folder->write("model.safetensors.index.json",
                R"({"metadata":{"total_size":1},"weight_map":{"a":"1.safetensors",)"
                R"("b":"2.safetensors"}})");
  write_tensors(*folder / "1.safetensors", {{"a", DType::kFloat32, {2}}});
  write_tensors(*folder / "2.safetensors", {{"b", DType::kBFloat16, {3}}});
  return folder;
}

std::string refusal(const fs::path& folder, ErrorKind kind = ErrorKind::kFormat) {
  return error_of(kind, [&] { HfFolder::open(folder); });
}

TEST(HfFolder, OneFileByItselfHasItsTensorsWhereverALinkLeads) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "far");
  write_tensors(folder / "far/blob", {{"a", DType::kFloat32, {2}}});
  fs::create_directories(folder / "near");
  fs::create_symlink(folder / "far/blob", folder / "near/a.safetensors");
  const auto one = HfFolder::of_file(folder / "near/a.safetensors");
  ASSERT_NE(one.find("a"), nullptr);
  EXPECT_EQ(one.total_bytes(), 8);
  EXPECT_EQ(one.config_text(), "");
}

// Naive: the file that is left over of an earlier save is read silently.
TEST(HfFolder, AFileNextToAnIndexThatDoesNotNameItIsReadAndNamed) {
  const auto said = [](const fs::path& path, std::size_t files) {
    ::testing::internal::CaptureStderr();
    set_log_level(LogLevel::kWarn);
    const HfFolder open = HfFolder::open(path);
    set_log_level(LogLevel::kNone);
    EXPECT_EQ(open.num_files(), files);
    return ::testing::internal::GetCapturedStderr();
  };
  const auto folder = sharded_folder();
  EXPECT_EQ(said(folder->path(), 2), "");
  write_tensors(*folder / "model.safetensors", {{"a", DType::kFloat32, {2}}});
  EXPECT_THAT(said(folder->path(), 1),
              Says(folder->path().string(),
                   "found model.safetensors next to model.safetensors.index.json, which "
                   "names '1.safetensors' and 1 more: model.safetensors is read",
                   "remove the one that is left over"));
  folder->write("model.safetensors.index.json", "torn");
  EXPECT_THAT(said(folder->path(), 1), Says("which cannot be read: model.safetensors is read"));
  // Some exporters write an index of the one file.
  folder->write("model.safetensors.index.json", R"({"weight_map":{"a":"model.safetensors"}})");
  EXPECT_EQ(said(folder->path(), 1), "");
}

TEST(HfFolder, AFileInThePlaceOfAFolderIsCalledSo) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder.write("manifest.json", "{}"), ErrorKind::kIo),
              Says("manifest.json': found a file, expected a model folder"));
  EXPECT_THAT(refusal("/dev/null", ErrorKind::kIo), Says("found something that is no folder"));
}

TEST(HfFolder, ReferenceSingleFileAndShardsHoldTheSameTensors) {
  const fs::path data = TESSERA_TEST_DATA;
  for (const std::string family : {"qwen3-mixed", "llama-fp32"}) {
    const HfFolder single = HfFolder::open(data / family);
    const HfFolder sharded = HfFolder::open(data / family / "sharded");
    EXPECT_EQ(single.num_files(), 1U);
    EXPECT_GT(sharded.num_files(), 2U);
    EXPECT_EQ(single.total_bytes(), sharded.total_bytes());
    ASSERT_EQ(single.tensors().size(), sharded.tensors().size());
    for (const auto& [name, tensor] : single.tensors()) {
      const TensorInfo* const other = sharded.find(name);
      ASSERT_NE(other, nullptr) << name;
      EXPECT_EQ(tensor.info->shape, other->shape) << name;
      const auto a = single.range(name, 0, tensor.info->numel());
      const auto b = sharded.range(name, 0, tensor.info->numel());
      EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << name;
      sharded.release(name, b);
      EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << name << ", read again";
    }
    EXPECT_THAT(single.config_text(), Says("\"vocab_size\": 128"));
  }
  EXPECT_EQ(HfFolder::open(data / "qwen3-mixed").bulk_dtype(), DType::kBFloat16);
  EXPECT_EQ(HfFolder::open(data / "qwen3-mixed").total_bytes(), 128640);  // its index's total_size
  EXPECT_EQ(HfFolder::open(data / "llama-fp32").bulk_dtype(), DType::kFloat32);
}

TEST(HfFolder, TensorsAreFoundByName) {
  const auto folder = sharded_folder();
  const HfFolder model = HfFolder::open(folder->path());
  EXPECT_EQ(model.find("b")->dtype, DType::kBFloat16);
  EXPECT_EQ(model.find("c"), nullptr);
  EXPECT_EQ(model.file(model.tensors().at("b").file).path().filename(), "2.safetensors");
  EXPECT_REFUSED(kFormat, model.range("c", 0, 0), "'c'");
}

TEST(HfFolder, BulkDtypeCountsFloatingElementsOnly) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  const auto bulk = [&](const std::vector<TensorSpec>& specs) {
    write_tensors(folder / "model.safetensors", specs);
    return HfFolder::open(folder.path()).bulk_dtype();
  };
  EXPECT_EQ(bulk({{"a", DType::kFloat32, {2}}, {"b", DType::kBFloat16, {3}}}), DType::kBFloat16);
  EXPECT_EQ(bulk({{"a", DType::kFloat32, {4}}, {"b", DType::kBFloat16, {3}}}), DType::kFloat32);
  EXPECT_EQ(bulk({{"a", DType::kFloat32, {3}}, {"b", DType::kBFloat16, {3}}}), DType::kBFloat16);
  EXPECT_EQ(bulk({{"a", DType::kFloat32, {1}}, {"b", DType::kInt64, {30}}}), DType::kFloat32);
  EXPECT_EQ(bulk({{"b", DType::kInt64, {30}}}), std::nullopt);
  EXPECT_EQ(bulk({}), std::nullopt);
}

TEST(HfFolder, SingleFileWinsOverAnIndex) {
  const auto folder = sharded_folder();
  write_tensors(*folder / "model.safetensors", {{"c", DType::kFloat32, {2}}});
  const HfFolder model = HfFolder::open(folder->path());
  EXPECT_NE(model.find("c"), nullptr);
  EXPECT_EQ(model.find("a"), nullptr);
}

TEST(HfFolder, WhatIsMissingIsNamed) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder / "nowhere", ErrorKind::kIo), Says("nowhere': found no such folder"));
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kIo), Says("config.json"));
  folder.write("config.json", "{}");
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kIo),
              Says("found neither model.safetensors nor model.safetensors.index.json"));
  const auto sharded = sharded_folder();
  fs::remove(*sharded / "2.safetensors");
  EXPECT_THAT(refusal(sharded->path(), ErrorKind::kIo), Says("2.safetensors"));
}

TEST(HfFolder, OversizedConfigIsRefused) {
  const TemporaryFolder folder;
  folder.write("config.json", std::string((4 << 20) + 1, ' '));
  EXPECT_THAT(refusal(folder.path()), Says("at most 4194304"));
}

TEST(HfFolder, IndexAndFilesThatDisagreeAreRefused) {
  auto folder = sharded_folder();
  write_tensors(*folder / "2.safetensors", {{"c", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), Says("'b'", "2.safetensors"));
  write_tensors(*folder / "2.safetensors",
                {{"b", DType::kFloat32, {2}}, {"c", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), Says("'c'", "does not name"));
  write_tensors(*folder / "2.safetensors",
                {{"b", DType::kFloat32, {2}}, {"a", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), Says("'a'", "expected it once"));
  // Both tensors are there, each in the other's file.
  write_tensors(*folder / "1.safetensors", {{"b", DType::kFloat32, {2}}});
  write_tensors(*folder / "2.safetensors", {{"a", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), Says("does not hold it"));
}

TEST(HfFolder, TruncatedShardIsRefused) {
  const auto folder = sharded_folder();
  fs::resize_file(*folder / "2.safetensors", fs::file_size(*folder / "2.safetensors") - 1);
  EXPECT_THAT(refusal(folder->path()), Says("2.safetensors"));
}

TEST(HfFolder, LinksThatLeadOutsideAreRefused) {
  const auto folder = sharded_folder();
  const TemporaryFolder outside;
  for (const std::string name : {"2.safetensors", "config.json", "model.safetensors.index.json"}) {
    fs::rename(*folder / name, outside / name);
    fs::create_symlink(outside / name, *folder / name);
    EXPECT_THAT(refusal(folder->path()), Says(name, "is a link to"));
    fs::remove(*folder / name);
    fs::rename(outside / name, *folder / name);
  }
  fs::create_symlink(outside / "config.json", *folder / "model.safetensors");
  EXPECT_THAT(refusal(folder->path(), ErrorKind::kIo), Says("model.safetensors"));
  // A link's text that merely begins like the folder's path leads outside as well.
  fs::path sibling = folder->path();
  sibling += "x";
  fs::create_directory(sibling);
  fs::rename(*folder / "2.safetensors", sibling / "2.safetensors");
  fs::create_symlink(sibling / "2.safetensors", *folder / "2.safetensors");
  fs::remove(*folder / "model.safetensors");
  EXPECT_THAT(refusal(folder->path()), Says("is a link to"));
  fs::remove_all(sibling);
}

TEST(HfFolder, LinksInsideAndTheHubCacheAreRead) {
  const auto folder = sharded_folder();
  fs::rename(*folder / "2.safetensors", *folder / "real");
  fs::create_symlink("real", *folder / "2.safetensors");
  EXPECT_NE(HfFolder::open(folder->path()).find("b"), nullptr);
  const TemporaryFolder cache;
  fs::create_directories(cache / "blobs");
  fs::create_directories(cache / "snapshots/f00d");
  for (const auto& entry : fs::directory_iterator(folder->path())) {
    const std::string name = entry.path().filename();
    if (entry.is_symlink()) continue;
    fs::rename(entry.path(), cache / ("blobs/" + name));
    const std::string link = name == "real" ? "2.safetensors" : name;
    fs::create_symlink("../../blobs/" + name, cache / ("snapshots/f00d/" + link));
  }
  EXPECT_NE(HfFolder::open(cache / "snapshots/f00d").find("b"), nullptr);
  // From anywhere else the same links lead outside.
  fs::rename(cache / "snapshots", cache / "elsewhere");
  EXPECT_THAT(refusal(cache / "elsewhere/f00d"), Says("is a link to"));
}

TEST(HfIndex, NamesThatAreNotPlainFilesAreRefused) {
  for (const std::string name : {"../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\\\b",
                                 "a\\u0000b", "a\\u001b[2J", "./a"}) {
    EXPECT_REFUSED(kFormat, parse_hf_index(R"({"weight_map":{"w":")" + name + "\"}}", "i.json"),
                   "i.json", "'w'")
        << name;
  }
  EXPECT_REFUSED(kFormat, parse_hf_index(R"({"weight_map":{"w":")" + std::string(256, 'a') + "\"}}",
                                         "i.json"));
}

TEST(HfIndex, MalformedTextIsRefused) {
  for (const std::string text :
       {"", "{", "[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":1})",
        R"({"weight_map":{"a":1}})", R"({"weight_map":{"a":null}})",
        R"({"weight_map":{"a":["f"]}})", R"({"weight_map":{"a":"f","a":"f"}})",
        R"({"weight_map":{"a":"f"},"weight_map":{"a":"f"}})", R"({"weight_map":{"a":"f"}} x)",
        "{\"weight_map\":{\"a\":\"\xff\"}}", R"({"n":1e999,"weight_map":{"a":"f"}})"}) {
    SCOPED_TRACE(text);
    EXPECT_REFUSED(kFormat, parse_hf_index(text, "i.json"));
  }
  const std::string deep(100'000, '[');
  EXPECT_REFUSED(kFormat, parse_hf_index("{\"m\":" + deep, "i.json"), "nested deeper");
}

TEST(HfIndex, OtherKeysAreIgnored) {
  const HfIndex index =
      parse_hf_index(R"({"metadata":{"total_size":"odd"},"weight_map":{"a":"f"}})", "i.json");
  EXPECT_EQ(index.weight_map, (std::map<std::string, std::string>{{"a", "f"}}));
}

// How tensors are divided over the files of a folder.

/// fp32 tensors of these numbers of elements, named a, b, c, ...
std::vector<TensorSpec> tensors(const std::vector<std::int64_t>& elements) {
  std::vector<TensorSpec> specs;
  for (const std::int64_t count : elements) {
    specs.push_back(
        {std::string(1, static_cast<char>('a' + specs.size())), DType::kFloat32, {count}});
  }
  return specs;
}

std::vector<std::string> names(const HfShard& shard) {
  std::vector<std::string> result;
  for (const TensorSpec& tensor : shard.tensors) result.push_back(tensor.name);
  return result;
}

TEST(PlanShards, WhatFitsIsOneFileWithThePlainName) {
  const auto shards = plan_shards(tensors({10, 20}), 120);
  ASSERT_EQ(shards.size(), 1U);
  EXPECT_EQ(shards[0].file, "model.safetensors");
  EXPECT_THAT(names(shards[0]), ElementsAre("a", "b"));
  EXPECT_EQ(plan_shards({}, 5).size(), 1U);
}

TEST(PlanShards, FilesAreFilledInOrderAndNumbered) {
  const auto shards = plan_shards(tensors({10, 20, 1, 29, 30}), 120);
  ASSERT_EQ(shards.size(), 3U);
  EXPECT_EQ(shards[0].file, "model-00001-of-00003.safetensors");
  EXPECT_EQ(shards[2].file, "model-00003-of-00003.safetensors");
  EXPECT_THAT(names(shards[0]), ElementsAre("a", "b"));
  EXPECT_THAT(names(shards[1]), ElementsAre("c", "d"));
  EXPECT_THAT(names(shards[2]), ElementsAre("e"));
}

TEST(PlanShards, ATensorAboveTheLimitHasAFileOfItsOwn) {
  const auto shards = plan_shards(tensors({1, 100, 1, 1}), 40);
  ASSERT_EQ(shards.size(), 3U);
  EXPECT_THAT(names(shards[1]), ElementsAre("b"));
  EXPECT_THAT(names(shards[2]), ElementsAre("c", "d"));
}

TEST(PlanShards, TheIndexNamesEveryTensorsFileAndTheReaderTakesIt) {
  const auto shards = plan_shards(tensors({10, 20, 30}), 120);
  const std::string text = index_json(shards);
  const HfIndex index = parse_hf_index(text, "index");
  EXPECT_EQ(index.weight_map.size(), 3U);
  EXPECT_EQ(index.weight_map.at("c"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(nlohmann::json::parse(text)["metadata"]["total_size"], 240);
}

TEST(ParseByteSize, TakesDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_byte_size("4096", "--s"), 4096);
  EXPECT_EQ(parse_byte_size("7B", "--s"), 7);
  EXPECT_EQ(parse_byte_size("5GB", "--s"), 5'000'000'000);
  EXPECT_EQ(parse_byte_size("500MB", "--s"), 500'000'000);
  EXPECT_EQ(parse_byte_size("2KiB", "--s"), 2048);
  EXPECT_EQ(parse_byte_size("1TiB", "--s"), std::int64_t{1} << 40);
}

TEST(ParseByteSize, RefusesEverythingElseByName) {
  for (const char* text : {"", "0", "0GB", "-1", "GB", "5 GB", "5gbb", "1.5GB", "5GBs",
                           "9223372036854775807KB", "99999999999999999999"}) {
    EXPECT_REFUSED(kUsage, parse_byte_size(text, "--max-shard-size"), "--max-shard-size") << text;
  }
}

// The index of unmasked targets compared with a look at every byte of the mask.
constexpr std::int64_t kBlock = LabelIndex::kBlockTokens;

/// Runs of kept and of other tokens, some longer than a block.
std::string drawn_mask(std::mt19937& draw, std::int64_t tokens) {
  std::string mask;
  for (bool kept = draw() % 2 == 0; std::ssize(mask) < tokens; kept = !kept) {
    const auto longest = draw() % 3 == 0 ? 3 * kBlock : 50;
    mask.append(1 + draw() % static_cast<unsigned>(longest), kept ? '\1' : '\0');
  }
  mask.resize(static_cast<std::size_t>(tokens));
  return mask;
}

TEST(LabelIndex, SaysOfAnyRangeWhatItsMaskSays) {
  std::mt19937 draw(20261126);
  for (int round = 0; round < 20; ++round) {
    const TemporaryFolder folder;
    const std::int64_t tokens = 1 + static_cast<std::int64_t>(draw() % (6 * kBlock));
    const std::string bytes = drawn_mask(draw, tokens);
    const MappedFile mask(folder.write("a.mask.bin", bytes));
    const LabelIndex counted(mask);
    counted.write(folder / "a.labels.bin");
    const LabelIndex read(folder / "a.labels.bin", mask);
    EXPECT_EQ(read.kept(), std::ranges::count(bytes, '\1'));
    for (int i = 0; i < 200; ++i) {
      const auto one = static_cast<std::int64_t>(draw() % static_cast<unsigned>(tokens + 1));
      const auto other = static_cast<std::int64_t>(draw() % static_cast<unsigned>(tokens + 1));
      const auto [begin, end] = std::minmax(one, other);
      const bool any = std::count(bytes.begin() + begin, bytes.begin() + end, '\1') > 0;
      EXPECT_EQ(read.any(mask, begin, end), any) << begin << " to " << end << " of " << tokens;
      EXPECT_EQ(counted.any(mask, begin, end), any);
    }
  }
}

TEST(LabelIndex, HasItsDocumentedBytes) {
  const TemporaryFolder folder;
  std::string bytes(static_cast<std::size_t>(kBlock) + 2, '\0');
  bytes[0] = bytes[7] = '\1';
  bytes[static_cast<std::size_t>(kBlock) + 1] = '\2';  // any value but 0
  LabelIndex(MappedFile(folder.write("a.mask.bin", bytes))).write(folder / "a.labels.bin");
  std::ifstream file(folder / "a.labels.bin", std::ios::binary);
  std::vector<std::uint64_t> numbers(4, 99);
  file.read(reinterpret_cast<char*>(numbers.data()), 32);
  EXPECT_EQ(file.gcount(), 24);
  EXPECT_THAT(numbers, ElementsAre(kBlock + 2, 2, 3, 99));
}

TEST(LabelIndex, OneThatDoesNotFitItsMaskIsRefused) {
  const TemporaryFolder folder;
  const MappedFile mask(folder.write("a.mask.bin", std::string(3 * kBlock, '\1')));
  const auto refusal = [&](const std::vector<std::int64_t>& numbers) {
    const auto path = folder.write(
        "a.labels.bin", {reinterpret_cast<const char*>(numbers.data()), numbers.size() * 8});
    const auto what = error_of(ErrorKind::kFormat, [&] { LabelIndex(path, mask); });
    EXPECT_THAT(what, Says("a.labels.bin: found", "the index of", "a.mask.bin", "remove it"));
    return what;
  };
  EXPECT_THAT(refusal({3 * kBlock, kBlock, 2 * kBlock}), Says("24 bytes instead of 32"));
  EXPECT_THAT(refusal({3 * kBlock - 1, 1, 2, 3}), Says("that of 12287 tokens"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, kBlock - 1, kBlock}), Says("in block 1"));
  EXPECT_THAT(refusal({3 * kBlock, -1, 1, 2}), Says("counts from 0 to -1 in block 0"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, 3 * kBlock, 3 * kBlock}), Says("in block 1"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, kBlock + 5, 2 * kBlock + 5}),
              Says("5 unmasked targets in block 1 where the mask has 4096"));
}

TEST(LabelIndex, OfAFileIsMadeOnceAndTaken) {
  const TemporaryFolder folder;
  folder.write("a.json", R"({"dtype":"uint16","num_tokens":4,"vocab_size":9})");
  folder.write("a.bin", std::string(8, '\0'));
  folder.write("a.mask.bin", std::string("\0\1\0\0", 4));
  TokenFile file(folder / "a.bin");
  EXPECT_FALSE(std::filesystem::exists(folder / "a.labels.bin")) << "before somebody asks";
  EXPECT_TRUE(file.has_target(1, 2));
  EXPECT_FALSE(file.has_target(2, 4));
  EXPECT_FALSE(file.has_target(1, 1));
  EXPECT_REFUSED(kUsage, file.has_target(3, 5));
  ASSERT_EQ(std::filesystem::file_size(folder / "a.labels.bin"), 16U);
  // Another mask of the same length: what lies there is not its index.
  folder.write("a.mask.bin", std::string("\0\1\1\0", 4));
  TokenFile changed(folder / "a.bin");
  EXPECT_REFUSED(kFormat, changed.has_target(0, 4),
                 "a.labels.bin: found 1 unmasked targets in block 0 where the mask has 2");
}

}  // namespace
}  // namespace tessera::hf_folder_test
