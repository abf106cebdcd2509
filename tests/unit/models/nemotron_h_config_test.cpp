// The config.json of Nemotron-H, in both spellings, what is refused in it, and where the word
// Infinity, which is no JSON, is read.
#include <nlohmann/json.hpp>

#include "models/description.h"
#include "models/family.h"
#include "models/keys/bare_infinity.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::nemotron_h_config_test {
namespace {

using nlohmann::json;

constexpr ConfigOfFolder kNemotron("nemotron-h-fp32");

TEST(NemotronHConfig, SaysLayersOfOnePart) {
  const ModelSpec spec = kNemotron.spec();
  EXPECT_EQ(spec.family, Family::kNemotronH);
  using enum LayerType;
  EXPECT_EQ(spec.layer_types, (std::vector{kLinear, kExperts, kFull, kMlp, kLinear}));
  EXPECT_EQ(routed_experts(spec).layers, std::vector<std::int64_t>{1});
  EXPECT_TRUE(spec.layers_without_rope.empty());
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    EXPECT_EQ(spec.is_moe(layer), layer == 1) << layer;
    EXPECT_EQ(spec.sees_nothing(layer), layer == 1 || layer == 3) << layer;
  }
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.mamba, (MambaSpec{.mamba_num_heads = 4,
                                   .mamba_head_dim = 12,
                                   .n_groups = 2,
                                   .ssm_state_size = 12,
                                   .conv_kernel = 4,
                                   .chunk_size = 32}));
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 8,
                               .experts_per_token = 3,
                               .moe_intermediate_size = 12,
                               .shared_intermediate_size = 20,
                               .scores = ExpertScores::kSigmoid,
                               .router_dtype = RouterDtype::kFloat32,
                               .norm_topk_prob = true,
                               .routed_scaling_factor = 2.5,
                               .activation = ExpertActivation::kReluSquared}));
}

TEST(NemotronHConfig, BothSpellingsSayTheSame) {
  EXPECT_EQ(spec_in_both_spellings("nemotron-h-fp32"), kNemotron.spec());
  const json earlier{"mamba", "moe", "attention", "mlp", "mamba"};
  EXPECT_EQ(kNemotron.spec({{"hybrid_override_pattern", nullptr}, {"layers_block_type", earlier}}),
            kNemotron.spec());
}

TEST(NemotronHConfig, WhatIsWrittenIsReadAsTheSame) {
  kNemotron.expect_kept({json::object(),
                         {{"hybrid_override_pattern", "M-*"}, {"num_hidden_layers", 3}},
                         {{"n_groups", 1}, {"use_conv_bias", false}, {"time_step_min", 0.0}},
                         {{"time_step_max", 0.5}, {"time_step_floor", 0.01}},
                         {{"rescale_prenorm_residual", false}},
                         {{"rope_theta", 5e5}, {"partial_rotary_factor", 0.5}},
                         {{"pad_token_id", nullptr}, {"norm_topk_prob", false}}});
}

TEST(NemotronHConfig, LayersThatDoNotFitAreRefused) {
  kNemotron.expect_refused(
      {{"hybrid_override_pattern", "ME*-",
        "num_hidden_layers: found 5, expected 4, the number of "
        "layers that hybrid_override_pattern names"},
       {"hybrid_override_pattern", "ME*-MM", "num_hidden_layers: found 5, expected 6"},
       {"hybrid_override_pattern", "ME*-X", "hybrid_override_pattern: found \"ME*-X\""},
       {"hybrid_override_pattern", "", "hybrid_override_pattern"},
       {"hybrid_override_pattern", nullptr, "hybrid_override_pattern"},
       {"layers_block_type", json::array({"mamba", "moe", "attention", "mlp", "mlp"}),
        "layers_block_type: found"},
       {"layers_block_type", json::array({"mamba", "moe", "attention", "mlp", "sliding"}),
        "layers_block_type: found"},
       {"layers_block_type", json::array(), "layers_block_type: found []"}});
}

TEST(NemotronHConfig, WhatIsNotComputedIsRefused) {
  kNemotron.expect_refused({{"moe_latent_size", 16},
                            {"mlp_bias", true},
                            {"use_bias", true},
                            {"mamba_proj_bias", true},
                            {"attention_bias", true},
                            {"time_step_limit", json::array({0.0, 1.0})},
                            {"time_step_limit", json::array({0.001, {{"__float__", "Infinity"}}})},
                            {"mlp_hidden_act", "silu"},
                            {"mamba_hidden_act", "relu"},
                            {"residual_in_fp32", true},
                            {"tie_word_embeddings", true},
                            {"n_shared_experts", 2},
                            {"norm_eps", 1e-6},
                            {"attention_head_dim", 8},
                            {"head_dim", 7,
                             "head_dim: found 7, expected an even number, as attention lays out "
                             "heads in pairs of elements, without rope, too"},
                            {"n_groups", 3, "n_groups: found 3, expected a divisor of"},
                            {"n_group", 3},
                            {"first_k_dense_replace", 1}});
}

TEST(NemotronHConfig, SaysInitialValues) {
  const auto found = [](const json& keys) { return *kNemotron.spec(keys).mamba; };
  EXPECT_EQ(found({{"time_step_max", 0.5}}).time_step_max, 0.5);
  EXPECT_EQ(found({{"time_step_floor", 0.01}}).time_step_floor, 0.01);
  EXPECT_FALSE(found({{"rescale_prenorm_residual", false}}).rescale_prenorm_residual);
  const ModelSpec absent =
      kNemotron.spec_without({"time_step_max", "time_step_floor", "rescale_prenorm_residual"});
  EXPECT_EQ(absent, kNemotron.spec());
  kNemotron.expect_refused({{"time_step_max", 0.0}, {"time_step_floor", -1.0}});
  EXPECT_THAT(kNemotron.refusal({{"time_step_min", 0.0}, {"time_step_floor", 0.0}}),
              Says("time_step_floor: found 0"));
}

TEST(NemotronHConfig, TensorParallelDegreesDivideTheGroups) {
  EXPECT_REFUSED(kConfig, check_degrees(kNemotron.spec({{"n_groups", 1}}), {.tp = 2}),
                 "tensor_parallel_degree: found 2, expected a divisor of n_groups = 1");
  EXPECT_NO_THROW(check_degrees(kNemotron.spec(), {.tp = 2}));
}

TEST(NemotronHConfig, ContextParallelismIsRefusedByTheLayersWithAState) {
  EXPECT_REFUSED(kConfig, check_degrees(kNemotron.spec(), {.cp = 2}),
                 "parallelism.context_parallel_degree: found 2 with layers ", " of Mamba-2",
                 "take context_parallel_degree = 1");
}

TEST(NemotronHConfig, NamesOfTransformersAndOfPredictionLayersAreKnown) {
  const auto name = traits(Family::kNemotronH).module_name;
  EXPECT_EQ(name("backbone.norm_f.weight"), "backbone.norm_f.weight");
  EXPECT_EQ(name("model.layers.0.mixer.A_log"), "backbone.layers.0.mixer.A_log");
  EXPECT_EQ(name("mtp.layers.0.mixer.q_proj.weight"), "");
}

std::string with_value(std::string_view key, std::string_view value) {
  return concat("{\"", key, "\": ", value, "}");
}

TEST(BareInfinity, IsReadInTheListOfStepLimits) {
  const json spelled{0.0, {{"__float__", "Infinity"}}};
  for (const char* value :
       {"[0.0, Infinity]", "[0.0,Infinity]", "[\n  0.0,\n  Infinity\n]", "[0.0, Infinity ]"}) {
    const std::string text = with_value("time_step_limit", value);
    EXPECT_EQ(json::parse(spell_bare_infinity(text)).at("time_step_limit"), spelled) << value;
  }
}

// Another key, depth, place or word: left as it stands, so that it is no JSON.
TEST(BareInfinity, IsRefusedElsewhere) {
  const std::string texts[] = {with_value("rope_theta", "Infinity"),
                               with_value("time_step_limit", "Infinity"),
                               with_value("time_step_limit", "[0.0, -Infinity]"),
                               with_value("time_step_limit", "[0.0, +Infinity]"),
                               with_value("time_step_limit", "[0.0, Infinity1]"),
                               with_value("time_step_limit", "[0.0, NaN]"),
                               with_value("time_step_limit", "[[0.0, Infinity]]"),
                               with_value("time_step_limit", "{\"a\": Infinity}"),
                               with_value("time_step_limits", "[0.0, Infinity]"),
                               with_value("text_config", "{\"time_step_limit\": [0.0, Infinity]}"),
                               R"({"time_step_limit": [0.0], "a": [Infinity]})",
                               R"({"a": "time_step_limit", "b": [Infinity]})",
                               R"({"a": "\"time_step_limit\": [", "b": [Infinity]})",
                               R"([0.0, Infinity])",
                               R"("time_step_limit": [Infinity])",
                               "{\"time_step_limit\": [Infinity"};
  for (const std::string& text : texts) {
    EXPECT_FALSE(json::accept(spell_bare_infinity(text))) << text;
  }
  const std::string quoted = R"({"a": "[0.0, Infinity]", "time_step_limit": ["Infinity"]})";
  EXPECT_EQ(spell_bare_infinity(quoted), quoted);
}

TEST(BareInfinity, OfAnyTextChangesNothingElse) {
  for (const char* text : {"", "Infinity", "\"", "\"\\", "{\"time_step_limit\":[Infinity,\"\\",
                           "]]]]Infinity", "{\"time_step_limit\": [\"\\\"Infinity\"", "{{{[["}) {
    std::string found = spell_bare_infinity(text);
    const std::string spelled = R"({"__float__": "Infinity"})";
    const auto at = found.find(spelled);
    if (at != std::string::npos) found.replace(at, spelled.size(), "Infinity");
    EXPECT_EQ(found, text);
  }
}

}  // namespace
}  // namespace tessera::models::nemotron_h_config_test
