#include "io/hf_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "io/safetensors.h"
#include "tessera/log_level.h"
#include "unit/io/temporary_folder.h"

namespace tessera::hf_folder_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
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
TEST(HfFolder, AFileBesideAnIndexThatDoesNotNameItIsReadAndNamed) {
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
              AllOf(HasSubstr(folder->path().string()),
                    HasSubstr("found model.safetensors beside model.safetensors.index.json, which "
                              "names '1.safetensors' and 1 more: model.safetensors is read"),
                    HasSubstr("remove the one that is left over")));
  folder->write("model.safetensors.index.json", "torn");
  EXPECT_THAT(said(folder->path(), 1),
              HasSubstr("which cannot be read: model.safetensors is read"));
  // Some exporters write an index of the one file.
  folder->write("model.safetensors.index.json", R"({"weight_map":{"a":"model.safetensors"}})");
  EXPECT_EQ(said(folder->path(), 1), "");
}

TEST(HfFolder, AFileInThePlaceOfAFolderIsCalledSo) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder.write("manifest.json", "{}"), ErrorKind::kIo),
              HasSubstr("manifest.json': found a file, expected a model folder"));
  EXPECT_THAT(refusal("/dev/null", ErrorKind::kIo), HasSubstr("found something that is no folder"));
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
    EXPECT_THAT(single.config_text(), HasSubstr("\"vocab_size\": 128"));
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
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { model.range("c", 0, 0); }), HasSubstr("'c'"));
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
  EXPECT_THAT(refusal(folder / "nowhere", ErrorKind::kIo),
              HasSubstr("nowhere': found no such folder"));
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kIo), HasSubstr("config.json"));
  folder.write("config.json", "{}");
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kIo),
              HasSubstr("found neither model.safetensors nor model.safetensors.index.json"));
  const auto sharded = sharded_folder();
  fs::remove(*sharded / "2.safetensors");
  EXPECT_THAT(refusal(sharded->path(), ErrorKind::kIo), HasSubstr("2.safetensors"));
}

TEST(HfFolder, OversizedConfigIsRefused) {
  const TemporaryFolder folder;
  folder.write("config.json", std::string((4 << 20) + 1, ' '));
  EXPECT_THAT(refusal(folder.path()), HasSubstr("at most 4194304"));
}

TEST(HfFolder, IndexAndFilesThatDisagreeAreRefused) {
  auto folder = sharded_folder();
  write_tensors(*folder / "2.safetensors", {{"c", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), AllOf(HasSubstr("'b'"), HasSubstr("2.safetensors")));
  write_tensors(*folder / "2.safetensors",
                {{"b", DType::kFloat32, {2}}, {"c", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), AllOf(HasSubstr("'c'"), HasSubstr("does not name")));
  write_tensors(*folder / "2.safetensors",
                {{"b", DType::kFloat32, {2}}, {"a", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), AllOf(HasSubstr("'a'"), HasSubstr("expected it once")));
  // Both tensors are there, each in the other's file.
  write_tensors(*folder / "1.safetensors", {{"b", DType::kFloat32, {2}}});
  write_tensors(*folder / "2.safetensors", {{"a", DType::kFloat32, {2}}});
  EXPECT_THAT(refusal(folder->path()), HasSubstr("does not hold it"));
}

TEST(HfFolder, TruncatedShardIsRefused) {
  const auto folder = sharded_folder();
  fs::resize_file(*folder / "2.safetensors", fs::file_size(*folder / "2.safetensors") - 1);
  EXPECT_THAT(refusal(folder->path()), HasSubstr("2.safetensors"));
}

TEST(HfFolder, LinksThatLeadOutsideAreRefused) {
  const auto folder = sharded_folder();
  const TemporaryFolder outside;
  for (const std::string name : {"2.safetensors", "config.json", "model.safetensors.index.json"}) {
    fs::rename(*folder / name, outside / name);
    fs::create_symlink(outside / name, *folder / name);
    EXPECT_THAT(refusal(folder->path()), AllOf(HasSubstr(name), HasSubstr("is a link to")));
    fs::remove(*folder / name);
    fs::rename(outside / name, *folder / name);
  }
  fs::create_symlink(outside / "config.json", *folder / "model.safetensors");
  EXPECT_THAT(refusal(folder->path(), ErrorKind::kIo), HasSubstr("model.safetensors"));
  // A link's text that merely begins like the folder's path leads outside as well.
  fs::path sibling = folder->path();
  sibling += "x";
  fs::create_directory(sibling);
  fs::rename(*folder / "2.safetensors", sibling / "2.safetensors");
  fs::create_symlink(sibling / "2.safetensors", *folder / "2.safetensors");
  fs::remove(*folder / "model.safetensors");
  EXPECT_THAT(refusal(folder->path()), HasSubstr("is a link to"));
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
  EXPECT_THAT(refusal(cache / "elsewhere/f00d"), HasSubstr("is a link to"));
}

TEST(HfIndex, NamesThatAreNotPlainFilesAreRefused) {
  for (const std::string name : {"../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\\\b",
                                 "a\\u0000b", "a\\u001b[2J", "./a"}) {
    EXPECT_THAT(
        error_of(ErrorKind::kFormat,
                 [&] { parse_hf_index(R"({"weight_map":{"w":")" + name + "\"}}", "i.json"); }),
        AllOf(HasSubstr("i.json"), HasSubstr("'w'")))
        << name;
  }
  error_of(ErrorKind::kFormat, [&] {
    parse_hf_index(R"({"weight_map":{"w":")" + std::string(256, 'a') + "\"}}", "i.json");
  });
}

TEST(HfIndex, MalformedTextIsRefused) {
  for (const std::string text :
       {"", "{", "[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":1})",
        R"({"weight_map":{"a":1}})", R"({"weight_map":{"a":null}})",
        R"({"weight_map":{"a":["f"]}})", R"({"weight_map":{"a":"f","a":"f"}})",
        R"({"weight_map":{"a":"f"},"weight_map":{"a":"f"}})", R"({"weight_map":{"a":"f"}} x)",
        "{\"weight_map\":{\"a\":\"\xff\"}}", R"({"n":1e999,"weight_map":{"a":"f"}})"}) {
    SCOPED_TRACE(text);
    error_of(ErrorKind::kFormat, [&] { parse_hf_index(text, "i.json"); });
  }
  const std::string deep(100'000, '[');
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { parse_hf_index("{\"m\":" + deep, "i.json"); }),
              HasSubstr("nested deeper"));
}

TEST(HfIndex, OtherKeysAreIgnored) {
  const HfIndex index =
      parse_hf_index(R"({"metadata":{"total_size":"odd"},"weight_map":{"a":"f"}})", "i.json");
  EXPECT_EQ(index.weight_map, (std::map<std::string, std::string>{{"a", "f"}}));
}

}  // namespace
}  // namespace tessera::hf_folder_test
