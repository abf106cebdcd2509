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

// It serves every family, and patterns that match nothing are refused: what decays none of them is no
// decay.
TEST(ShippedConfigs, FinetuningDecaysNothing) {
  const Config config = load_config(std::string(TESSERA_CONFIGS) + "/finetune.toml");
  EXPECT_EQ(config.optimizer.effective_weight_decay(), 0.0);
  EXPECT_LE(*config.optimizer.lr, 5e-5) << "of a whole model that is trained already";
}

}  // namespace
}  // namespace tessera::train::shipped_configs_test
