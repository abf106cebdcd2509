// How tensors are divided over the files of a folder.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <set>

#include "io/hf_folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::hf_shards_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
    EXPECT_THAT(
        testing::error_of(ErrorKind::kUsage, [&] { parse_byte_size(text, "--max-shard-size"); }),
        HasSubstr("--max-shard-size"))
        << text;
  }
}

}  // namespace
}  // namespace tessera::hf_shards_test
