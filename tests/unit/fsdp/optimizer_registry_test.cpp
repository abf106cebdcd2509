#include "fsdp/optim/optimizer_registry.h"

#include <gtest/gtest.h>

namespace tessera::test::optimizer_registry_test {
namespace {

using fsdp::Hyperparameters;
using fsdp::OptimizerName;

// Checkpoints hold these names, configurations and their hash all of it.
TEST(OptimizerRegistry, NamesAndDefaultsAreThoseOfWrittenFiles) {
  EXPECT_EQ(fsdp::name_of(OptimizerName::kAdamW), "AdamW");
  EXPECT_EQ(fsdp::name_of(OptimizerName::kSgd), "SGD");
  EXPECT_EQ(fsdp::default_weight_decay(OptimizerName::kAdamW), 0.1);
  EXPECT_EQ(fsdp::default_weight_decay(OptimizerName::kSgd), 0.0);
  const Hyperparameters values;
  EXPECT_EQ(values.betas, (fsdp::Betas{0.9, 0.95}));
  EXPECT_EQ(values.eps, 1e-8);
  EXPECT_FALSE(values.momentum.has_value());
  EXPECT_EQ(fsdp::name_of(OptimizerName::kMuon), "Muon");
  EXPECT_EQ(fsdp::default_weight_decay(OptimizerName::kMuon), 0.1);
  EXPECT_EQ(fsdp::default_momentum(OptimizerName::kSgd), 0.0);
  EXPECT_EQ(fsdp::default_momentum(OptimizerName::kMuon), 0.95);
  EXPECT_FALSE(values.weight_decay.has_value());
}

TEST(OptimizerRegistry, DefaultsThatDifferAreNamed) {
  EXPECT_EQ(fsdp::default_weight_decays(), "0.1; 0 for SGD");
}

}  // namespace
}  // namespace tessera::test::optimizer_registry_test
