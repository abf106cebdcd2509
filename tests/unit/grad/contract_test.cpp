#include "tessera/contract.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "grad/contract_key.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::contract_test {
namespace {

TEST(Contract, NumelOfScalarsAndOfEmptyShapes) {
  ParameterMeta meta = scratch("w");
  EXPECT_EQ(meta.numel(), 12);
  meta.shape = {};
  EXPECT_EQ(meta.numel(), 1);
  meta.shape = {0, std::int64_t{1} << 62, std::int64_t{1} << 62};
  EXPECT_ANY_THROW(meta.numel());
  meta.shape = {5, 0};
  EXPECT_EQ(meta.numel(), 0);
}

TEST(Contract, KeyCarriesEveryDtypeOfATrainableParameter) {
  PrecisionPolicy policy = mixed_policy();
  policy.final_dtype = DType::kFloat64;
  policy.reduce_dtype = DType::kBFloat16;
  const ReductionPlan reductions{{"dp_shard"}, {}, 2};
  const GradContract contract = resolve_contracts({scratch("w")}, policy, reductions).front();
  const layout::BucketKey key = key_of(contract);
  EXPECT_EQ(key.storage, DType::kFloat32);
  EXPECT_EQ(key.compute, DType::kBFloat16);
  EXPECT_EQ(key.accumulate, DType::kFloat32);
  EXPECT_EQ(key.reduce, DType::kBFloat16);
  EXPECT_EQ(key.final, DType::kFloat64);
  EXPECT_TRUE(key.trainable);
  EXPECT_EQ(key.reductions, reductions);
}

TEST(Contract, FrozenParametersShareABucketWhateverTheirGradientDtypes) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("a"), rule_for("*")};
  policy.rules[0].reduce_dtype = DType::kBFloat16;
  policy.rules[1].frozen = FrozenRule::kYes;
  const auto contracts = resolve_contracts({scratch("a"), scratch("b")}, policy, {});
  EXPECT_EQ(key_of(contracts[0]), key_of(contracts[1]));
  policy.rules.pop_back();
  const auto trained = resolve_contracts({scratch("a"), scratch("b")}, policy, {});
  EXPECT_FALSE(key_of(trained[0]) == key_of(trained[1]));
}

TEST(Contract, WholeFrozenParametersHaveABucketOfOneSliceInTheirComputeDtype) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("a"), rule_for("b")};
  policy.rules[0].frozen = FrozenRule::kShard;
  policy.rules[1].frozen = FrozenRule::kReplicate;
  const auto contracts =
      resolve_contracts({scratch("a"), scratch("b")}, policy, {{"dp_shard"}, {"dp_replicate"}, 2});
  EXPECT_FALSE(key_of(contracts[0]).replicated);
  const layout::BucketKey key = key_of(contracts[1]);
  EXPECT_TRUE(key.replicated);
  EXPECT_EQ(key.storage, DType::kBFloat16) << "cast once after loading";
  EXPECT_TRUE(key.reductions.shard_axes.empty() && key.reductions.replica_axes.empty());
}

const AxisPlacement kOnTp{"tp", 2, {PlacementKind::kShard, 0}, {PlacementKind::kShard, 0}};

// A rank's tensor is a part of the parameter; dtypes, decay and names are those of the whole.
TEST(Contract, LayoutGivesLocalShapeReductionsAndAColumn) {
  ParameterMeta cut = scratch("w");
  cut.layout.axes = {kOnTp};
  ParameterMeta copied = scratch("norm");
  copied.layout.axes = {{"tp", 2, {PlacementKind::kReplicate}, {PlacementKind::kPartial}}};
  const DataAxes data(MeshShape::dense(1, 1, 4, 1, 2));
  const auto contracts = resolve_contracts({cut, copied}, mixed_policy(), data);
  EXPECT_EQ(contracts[0].local_shape(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(contracts[0].numel(), 12);
  EXPECT_EQ(contracts[0].local_numel(), 6);
  EXPECT_EQ(to_string(contracts[0].reductions), "sum over dp_shard, / 4");
  EXPECT_EQ(to_string(contracts[1].reductions), "sum over dp_shard x tp, / 4");
  EXPECT_EQ(contracts[1].local_numel(), 12);
  EXPECT_FALSE(key_of(contracts[0]) == key_of(contracts[1]));
  const auto table = to_string(contracts);
  EXPECT_THAT(table, ::testing::HasSubstr("placement"));
  EXPECT_THAT(table, ::testing::HasSubstr("tp 2 S(0), gradient S(0)"));
  EXPECT_THAT(table, ::testing::HasSubstr("tp 2 R, gradient P"));
}

TEST(Contract, HashChangesWithEveryFieldButNotWithReasons) {
  const GradContract base = resolve_only(scratch("w"), mixed_policy());
  const std::vector<std::function<void(GradContract&)>> changes = {
      [](GradContract& c) { c.name = "v"; },
      [](GradContract& c) { c.shape = {3, 4}; },
      [](GradContract& c) { c.shape = {12}; },
      [](GradContract& c) { c.storage.dtype = DType::kBFloat16; },
      [](GradContract& c) { c.compute.dtype = DType::kFloat32; },
      [](GradContract& c) { c.loaded_through = DType::kBFloat16; },
      [](GradContract& c) { c.grad = DType::kFloat32; },
      [](GradContract& c) { c.accumulate = DType::kFloat64; },
      [](GradContract& c) { c.reduce = DType::kBFloat16; },
      [](GradContract& c) { c.final = DType::kBFloat16; },
      [](GradContract& c) { c.trainable = false; },
      [](GradContract& c) { c.frozen_as = FrozenAs::kReplicate; },
      [](GradContract& c) { c.master = Master::kCopy; },
      [](GradContract& c) { c.compute.rounding = Rounding::kHalfAway; },
      [](GradContract& c) { c.state = DType::kBFloat16; },
      [](GradContract& c) { c.decays = true; },
      [](GradContract& c) { c.decays = false; },
      [](GradContract& c) { c.raw_sum_by_autograd = true; },
      [](GradContract& c) { c.reductions.shard_axes = {"dp_shard"}; },
      [](GradContract& c) { c.reductions.replica_axes = {"dp_shard"}; },
      [](GradContract& c) { c.reductions.divide_factor = 2; },
      [](GradContract& c) { c.aliases = {"v"}; },
      [](GradContract& c) { c.layout.mesh = MeshKind::kSparse; },
      [](GradContract& c) { c.layout.sharded_shape = {2, 2, 3}; },
      [](GradContract& c) { c.layout.axes = {kOnTp}; },
      [](GradContract& c) { c.layout.axes = {kOnTp, kOnTp}; },
      [](GradContract& c) { (c.layout.axes = {kOnTp}).front().size = 4; },
      [](GradContract& c) { (c.layout.axes = {kOnTp}).front().parameter.dim = 1; },
  };
  std::set<std::uint64_t> seen = {hash({base}), hash(std::vector<GradContract>{}),
                                  hash({base, base})};
  for (const auto& change : changes) {
    GradContract changed = base;
    change(changed);
    seen.insert(hash({changed}));
  }
  EXPECT_EQ(seen.size(), changes.size() + 3);
  GradContract told = base;
  told.reason(ContractField::kCompute) = "another reason";
  EXPECT_EQ(hash({told}), hash({base}));
}

TEST(Contract, TableIsAlignedAndNumbersItsReasons) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("head")};
  policy.rules[0].frozen = FrozenRule::kYes;
  ParameterMeta head = stored("head.weight", DType::kFloat32);
  head.aliases = {"embed.weight"};
  const std::string text = to_string(
      resolve_contracts({stored("w", DType::kBFloat16), head}, policy, {{"dp_shard"}, {}, 2}));
  EXPECT_EQ(
      text,
      "parameter                   shape  trained        storage       compute       grad    "
      "           accumulate   reduce       final        master         state        decay       "
      " reductions\n"
      "w                           4x3    trainable (1)  bfloat16 (2)  bfloat16 (3)  "
      "as it arrives (4)  float32 (5)  float32 (6)  float32 (7)  remainder (8)  float32 (7)  "
      "unknown (9)  sum over dp_shard, / 2\n"
      "head.weight = embed.weight  4x3    frozen (10)    float32 (2)   float32 (11)  -       "
      "           -            -            -            -              -            -           "
      " -\n"
      "(1) the model\n"
      "(2) as in the checkpoint\n"
      "(3) [precision] param_dtype\n"
      "(4) nothing asks for rounding on arrival; where one forward uses it more than once, "
      "the sum of the uses is autograd's, in bfloat16\n"
      "(5) float32 unless asked otherwise\n"
      "(6) [precision] reduce_dtype\n"
      "(7) as the master\n"
      "(8) storage is bfloat16\n"
      "(9) the optimizer's own no_decay says\n"
      "(10) rule 1 (head)\n"
      "(11) recorded by the checkpoint (float32, most of it bfloat16)\n");
}

TEST(Contract, FieldsHaveTheNamesOfTheTable) {
  EXPECT_EQ(to_string(ContractField::kStorage), "storage");
  EXPECT_EQ(to_string(ContractField::kTrainable), "trainable");
}

TEST(Contract, PatternsAreThoseOfTheRules) {
  EXPECT_TRUE(matches_name("*norm", "model.layers.0.input_layernorm.weight"));
  EXPECT_FALSE(matches_name("norm", "model.layers.0.input_layernorm.weight"));
}

}  // namespace
}  // namespace tessera::grad::testing::contract_test
