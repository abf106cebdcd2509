#include "models/description.h"
#include "support/test.h"
#include "train/plan_of_run.h"

namespace tessera::train::model_plan_test {
namespace {

// Qwen3-0.6B's dimensions.
models::ModelSpec large_spec() {
  models::ModelSpec spec;
  spec.vocab_size = 151936;
  spec.hidden_size = 1024;
  spec.num_hidden_layers = 28;
  spec.num_attention_heads = 16;
  spec.num_key_value_heads = 8;
  spec.head_dim = 128;
  spec.intermediate_size = 3072;
  return spec;
}

std::vector<GradContract> contracts_of(const models::ModelSpec& spec) {
  std::vector<ParameterMeta> metas;
  for (const auto& parameter : models::describe(spec).parameters) {
    if (!parameter.tied_to.empty()) continue;
    ParameterMeta meta;
    meta.name = parameter.name;
    meta.shape = parameter.shape;
    metas.push_back(meta);
  }
  PrecisionPolicy policy;
  policy.param_dtype = DType::kBFloat16;
  return resolve_contracts(metas, policy, {{"dp_shard"}, {}, 1.0});
}

TEST(TrainModelPlan, ALargeModelOn64RanksHasEveryElementOnceAndLittlePadding) {
  for (const bool tied : {false, true}) {
    auto spec = large_spec();
    spec.tie_word_embeddings = tied;
    const layout::ModelPlan plan =
        plan_model(models::describe(spec), contracts_of(spec), MeshShape::dense(1, 1, 64, 1, 1));
    ASSERT_EQ(plan.units.size(), 1U + 28U + (tied ? 0U : 2U));
    std::int64_t placed = 0;
    std::int64_t padding = 0;
    for (const auto& unit : plan.units) {
      layout::validate(unit.plan, unit.items, plan.options);
      for (const auto& bucket : unit.plan.buckets) {
        EXPECT_EQ(bucket.ranks, 64);
        padding += layout::padding_numel(bucket);
      }
      for (const auto& item : unit.items) placed += item.numel;
    }
    EXPECT_EQ(placed, models::total_numel(models::describe(spec).parameters));
    EXPECT_LT(padding, placed / 1000);
    EXPECT_EQ(plan.units.back().plan.name, tied ? "model.layers.27" : "head");
    EXPECT_EQ(plan.units.front().items.empty(), !tied)
        << "without small buckets only a tied embedding and the last norm belong to the root";
  }
}

TEST(TrainModelPlan, UnitsOfTheContractHoldEveryParameterOnceAndCastNothingThemselves) {
  for (const bool tied : {false, true}) {
    auto spec = large_spec();
    spec.tie_word_embeddings = tied;
    std::vector<ParameterMeta> metas;
    for (const GradContract& contract : contracts_of(spec)) {
      metas.emplace_back();
      metas.back().name = contract.name;
    }
    const auto units = units_of(models::describe(spec), metas);
    ASSERT_EQ(units.size(), 1 + models::describe(spec).units.size());
    EXPECT_EQ(units.front().name, "");
    EXPECT_FALSE(units.front().nested);
    std::vector<int> seen(metas.size(), 0);
    for (const UnitMeta& unit : units) {
      EXPECT_FALSE(unit.casts_inputs);
      EXPECT_EQ(unit.nested, &unit != &units.front());
      for (const std::size_t parameter : unit.parameters) ++seen.at(parameter);
    }
    EXPECT_EQ(seen, std::vector<int>(metas.size(), 1));
    EXPECT_EQ(units.front().parameters.empty(), !tied);
  }
}

}  // namespace
}  // namespace tessera::train::model_plan_test
