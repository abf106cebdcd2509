#include "fsdp/optim/optimizer_registry.h"

#include "support/test.h"

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

TEST(OptimizerRegistry, KeysOfAnotherOptimizerAreNamed) {
  Hyperparameters values;
  values.weight_decay = 0.3;
  for (const auto name : {OptimizerName::kAdamW, OptimizerName::kSgd, OptimizerName::kMuon}) {
    EXPECT_THAT(fsdp::keys_without_effect(name, values), IsEmpty());
  }
  values.betas = {0.8, 0.9};
  values.momentum = 0.9;
  values.nesterov = false;
  values.ns_steps = 4;
  values.adamw_lr_scale = 0.5;
  EXPECT_THAT(fsdp::keys_without_effect(OptimizerName::kAdamW, values),
              ElementsAre("momentum", "nesterov", "ns_steps", "adamw_lr_scale"));
  EXPECT_THAT(fsdp::keys_without_effect(OptimizerName::kSgd, values),
              ElementsAre("betas", "nesterov", "ns_steps", "adamw_lr_scale"));
  EXPECT_THAT(fsdp::keys_without_effect(OptimizerName::kMuon, values), IsEmpty());
}

}  // namespace
}  // namespace tessera::test::optimizer_registry_test
