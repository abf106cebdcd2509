#include <limits>

#include "models/adapters.h"
#include "models/description.h"
#include "support/test.h"
#include "unit/models/small_spec.h"

namespace tessera::models::lora_test {
namespace {

LoraRequest asks(std::vector<std::string> targets, std::int64_t rank = 4) {
  return {.rank = rank, .alpha = 8.0, .targets = std::move(targets), .dropout = 0.0};
}

std::string refusal(const ModelSpec& spec, const LoraRequest& request) {
  return refusal_of(ErrorKind::kConfig, [&] { plan_lora(spec, request); });
}

TEST(Lora, PatternsNameLayersByTheirEnd) {
  EXPECT_THAT(plan_lora(small(), asks({"q_proj", "layers.1.mlp.*"})).layers,
              ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                          "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj",
                          "model.layers.1.mlp.down_proj"));
  EXPECT_THAT(plan_lora(small(), asks({"lm_head"})).layers, ElementsAre("lm_head"));
  EXPECT_EQ(plan_lora(small(), asks({"*"})).layers, adaptable_layers(small()));
  EXPECT_EQ(adaptable_layers(small()).size(), 2U * 7U + 1U);
  EXPECT_FALSE(plan_lora(small(), {}));
}

TEST(Lora, RowsStandBehindTheirLayerInItsUnit) {
  ModelSpec spec = small();
  spec.attention_bias = true;
  const LoraSpec lora = plan_lora(spec, asks({"layers.1.self_attn.k_proj"}));
  const auto table = describe(spec, lora).parameters;
  ASSERT_EQ(table.size(), describe(spec).parameters.size() + 2);
  std::size_t bias = 0;
  while (table[bias].name != "model.layers.1.self_attn.k_proj.bias") ++bias;
  const ParameterSpec& a = table[bias + 1];
  const ParameterSpec& b = table[bias + 2];
  EXPECT_EQ(a.name, "model.layers.1.self_attn.k_proj.lora_A.weight");
  EXPECT_THAT(a.shape, ElementsAre(4, 32));
  EXPECT_EQ(a.init, InitKind::kUniform);
  EXPECT_DOUBLE_EQ(a.init_std, 1.0 / std::sqrt(32.0));
  EXPECT_EQ(b.name, "model.layers.1.self_attn.k_proj.lora_B.weight");
  EXPECT_THAT(b.shape, ElementsAre(32, 4));
  EXPECT_EQ(b.init, InitKind::kZeros);
  EXPECT_EQ(a.unit, "model.layers.1");
  EXPECT_EQ(b.unit, "model.layers.1");
  std::vector<ParameterSpec> adapters = table;
  std::erase_if(adapters, [](const ParameterSpec& row) { return !is_adapter(row.name); });
  EXPECT_EQ(adapters, (std::vector<ParameterSpec>{a, b}));
  EXPECT_TRUE(is_adapter(a.name));
  EXPECT_EQ(adapted_layer(b.name), "model.layers.1.self_attn.k_proj");
  EXPECT_EQ(adapted_weight(adapted_layer(b.name)), "model.layers.1.self_attn.k_proj.weight");
}

// Naive: it trains, to NaN, and the advice is a lower learning rate.
TEST(Lora, AFactorThatFloat32DoesNotHoldIsRefusedByItsKey) {
  LoraRequest request = asks({"q_proj"}, 1);
  const auto with = [&](double alpha) { return request.alpha = alpha, refusal(small(), request); };
  for (const double alpha : {1e308, 3.5e38, 1e-46, 0.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(with(alpha),
                AllOf(StartsWith("lora.alpha: found "), Says("lora.rank 1"), Says("float32")))
        << alpha;
  }
  EXPECT_EQ(with(3.4e38), "");
  EXPECT_EQ(with(1e-44), "");
  request.rank = 16;  // of which alpha / rank is held
  EXPECT_EQ(with(1e39), "");
}

TEST(Lora, TargetsThatAreNoLinearLayersAreRefused) {
  EXPECT_THAT(refusal(small(), asks({})), Says("lora.targets: found nothing"));
  EXPECT_THAT(refusal(small(), asks({"q_prj"})), Says("'q_prj', which matches nothing", "q_proj"));
  EXPECT_THAT(refusal(small(), asks({"q_proj", "q_norm"})),
              Says("q_norm, which is no linear layer"));
  EXPECT_THAT(refusal(small(), asks({"self_attn"})), Says("which is no linear layer"));
  EXPECT_THAT(refusal(small(), asks({"embed_tokens"})), Says("which is no linear layer"));
  ModelSpec tied = small();
  tied.tie_word_embeddings = true;
  for (const char* pattern : {"lm_head", "*"}) {
    EXPECT_THAT(refusal(tied, asks({pattern})), Says("tied to model.embed_tokens.weight", pattern));
  }
}

TEST(Lora, ARankAboveTheMatrixIsRefusedWithItsName) {
  EXPECT_EQ(refusal(small(), asks({"v_proj"}, 32)), "");
  EXPECT_THAT(refusal(small(), asks({"v_proj"}, 33)),
              Says("lora.rank: found 33, expected at most 32", "model.layers.0.self_attn.v_proj"));
}

/// Small, with three experts in each layer.
ModelSpec with_experts() {
  ModelSpec spec = small();
  spec.family = Family::kQwen3Moe;
  MoeSpec& moe = spec.moe.emplace();
  moe.num_experts = 3;
  moe.experts_per_token = 2;
  moe.moe_intermediate_size = 24;
  return spec;
}

TEST(LoraOfExperts, ProductsAreMeantOnlyWhereExpertsAreNamed) {
  const ModelSpec spec = with_experts();
  EXPECT_THAT(
      plan_lora(spec, asks({"layers.1.mlp.experts.*", "experts.down_proj"})).layers,
      ElementsAre("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj",
                  "model.layers.1.mlp.experts.down_proj"));
  EXPECT_THAT(plan_lora(spec, asks({"self_attn.*"})).layers, ::testing::SizeIs(2 * 4));
  EXPECT_THAT(refusal(spec, asks({"down_proj"})),
              Says("model.layers.0.mlp.experts.down_proj",
                   "meant only where they are named: \"experts.down_proj\""));
  EXPECT_THAT(refusal(spec, asks({"experts"})), Says("which is no linear layer"));
  EXPECT_THAT(refusal(spec, asks({"experts.gate_proj"})), Says("matches nothing", "nearest name"));
}

TEST(LoraOfExperts, DropoutAndARankAboveAnExpertsMatrixAreRefused) {
  const ModelSpec spec = with_experts();
  EXPECT_EQ(refusal(spec, asks({"experts.*"}, 24)), "");
  EXPECT_THAT(refusal(spec, asks({"experts.*"}, 25)),
              Says("lora.rank: found 25, expected at most 24", "experts.down_proj [32, 24]"));
  LoraRequest drops = asks({"q_proj", "experts.down_proj"});
  drops.dropout = 0.1;
  EXPECT_THAT(refusal(spec, drops),
              AllOf(StartsWith("lora.dropout: found 0.1"),
                    Says("model.layers.0.mlp.experts.down_proj"), Says("peft")));
}

// Each rank of a layout holds these parts, and its gradients are these sums.
TEST(LoraOfExperts, FactorsLieAsTheirProducts) {
  const ModelSpec spec = with_experts();
  const LoraSpec lora = plan_lora(spec, asks({"layers.1.mlp.experts.*"}));
  const auto rows = [&](const ParallelDims& degrees) {
    std::map<std::string, ParameterSpec> found;
    for (const ParameterSpec& row : describe(spec, lora, degrees).parameters) {
      const std::string stem = "model.layers.1.mlp.experts.";
      if (is_adapter(row.name)) found[row.name.substr(stem.size())] = row;
    }
    return found;
  };
  const auto one = rows({});
  ASSERT_EQ(one.size(), 4U);
  const ParameterSpec& a = one.at("gate_up_proj.lora_A.weight");
  EXPECT_THAT(a.shape, ElementsAre(3, 4, 32));
  EXPECT_EQ(a.init, InitKind::kUniform);
  EXPECT_DOUBLE_EQ(a.init_std, 1.0 / std::sqrt(32.0));
  EXPECT_EQ(a.part, ModelPart::kExperts);
  EXPECT_EQ(a.unit, "model.layers.1");
  EXPECT_THAT(one.at("gate_up_proj.lora_B.weight").shape, ElementsAre(3, 48, 4));
  EXPECT_EQ(one.at("gate_up_proj.lora_B.weight").init, InitKind::kZeros);
  EXPECT_THAT(one.at("down_proj.lora_A.weight").shape, ElementsAre(3, 4, 24));
  EXPECT_THAT(one.at("down_proj.lora_B.weight").shape, ElementsAre(3, 32, 4));

  ParallelDims cut;
  cut.dp_shard = 3;
  cut.tp = 2;
  cut.ep = 3;
  cut.etp = 2;
  const auto shared = rows(cut);
  const auto layout = [&](const char* name) {
    const ParameterSpec& row = shared.at(name);
    EXPECT_EQ(row.shape, one.at(name).shape) << name;
    return to_string(row.layout);
  };
  EXPECT_EQ(layout("gate_up_proj.lora_A.weight"),
            "ep 3 S(0), gradient S(0); etp 2 R, gradient P (sparse mesh)");
  EXPECT_EQ(layout("gate_up_proj.lora_B.weight"),
            "ep 3 S(0), gradient S(0); etp 2 S(2), gradient S(2) of 3x2x24x4 (sparse mesh)");
  EXPECT_EQ(layout("down_proj.lora_A.weight"),
            "ep 3 S(0), gradient S(0); etp 2 S(2), gradient S(2) (sparse mesh)");
  EXPECT_EQ(layout("down_proj.lora_B.weight"),
            "ep 3 S(0), gradient S(0); etp 2 R, gradient P (sparse mesh)");
}

}  // namespace
}  // namespace tessera::models::lora_test
