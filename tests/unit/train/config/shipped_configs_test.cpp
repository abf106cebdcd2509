// Every file of configs/ reads, is valid for training, and divides over two ranks.
#include <gtest/gtest.h>

#include <filesystem>

#include "train/config/config_resolve.h"

namespace tessera::train::shipped_configs_test {
namespace {

TEST(ShippedConfigs, AreValidOnTwoRanks) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_CONFIGS)) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path().string());
    ++files;
    Config config;
    ASSERT_NO_THROW(config = load_config(entry.path().string()));
    EXPECT_NO_THROW(validate(config, Verb::kTrain));
    EXPECT_NO_THROW(
        resolve_batch(config.training, resolve_parallelism(config.parallelism, 2).data_ranks()));
  }
  EXPECT_GE(files, 1);
}

}  // namespace
}  // namespace tessera::train::shipped_configs_test
