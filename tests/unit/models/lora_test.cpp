#include <gmock/gmock.h>

#include <limits>

#include "models/adapters.h"
#include "models/description.h"
#include "tessera/error.h"
#include "unit/models/small_spec.h"

namespace tessera::models::lora_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

LoraRequest asks(std::vector<std::string> targets, std::int64_t rank = 4) {
  return {.rank = rank, .alpha = 8.0, .targets = std::move(targets), .dropout = 0.0};
}

std::string refusal(const ModelSpec& spec, const LoraRequest& request) {
  try {
    plan_lora(spec, request);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  return "accepted";
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
  EXPECT_EQ(adapted_weight(b.name), "model.layers.1.self_attn.k_proj.weight");
  EXPECT_EQ(adapted_weight("model.norm.weight"), "model.norm.weight");
}

// Naive: it trains, to NaN, and the advice is a lower learning rate.
TEST(Lora, AFactorThatFloat32DoesNotHoldIsRefusedByItsKey) {
  LoraRequest request = asks({"q_proj"}, 1);
  const auto with = [&](double alpha) { return request.alpha = alpha, refusal(small(), request); };
  for (const double alpha : {1e308, 3.5e38, 1e-46, 0.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(with(alpha), AllOf(StartsWith("lora.alpha: found "), HasSubstr("lora.rank 1"),
                                   HasSubstr("float32")))
        << alpha;
  }
  EXPECT_EQ(with(3.4e38), "accepted");
  EXPECT_EQ(with(1e-44), "accepted");
  request.rank = 16;  // of which alpha / rank is held
  EXPECT_EQ(with(1e39), "accepted");
}

TEST(Lora, TargetsThatAreNoLinearLayersAreRefused) {
  EXPECT_THAT(refusal(small(), asks({})), HasSubstr("lora.targets: found nothing"));
  EXPECT_THAT(refusal(small(), asks({"q_prj"})),
              AllOf(HasSubstr("'q_prj', which matches nothing"), HasSubstr("q_proj")));
  EXPECT_THAT(refusal(small(), asks({"q_proj", "q_norm"})),
              HasSubstr("q_norm, which is no linear layer"));
  EXPECT_THAT(refusal(small(), asks({"self_attn"})), HasSubstr("which is no linear layer"));
  EXPECT_THAT(refusal(small(), asks({"embed_tokens"})), HasSubstr("which is no linear layer"));
  ModelSpec tied = small();
  tied.tie_word_embeddings = true;
  for (const char* pattern : {"lm_head", "*"}) {
    EXPECT_THAT(refusal(tied, asks({pattern})),
                AllOf(HasSubstr("tied to model.embed_tokens.weight"), HasSubstr(pattern)));
  }
}

TEST(Lora, ARankAboveTheMatrixIsRefusedWithItsName) {
  EXPECT_EQ(refusal(small(), asks({"v_proj"}, 32)), "accepted");
  EXPECT_THAT(refusal(small(), asks({"v_proj"}, 33)),
              AllOf(HasSubstr("lora.rank: found 33, expected at most 32"),
                    HasSubstr("model.layers.0.self_attn.v_proj")));
}

}  // namespace
}  // namespace tessera::models::lora_test
