// Families in which layers with a state stand between layers of attention, as their config.json
// says them: which layer is what, what the layers hold, what is refused, what is written.

#include <filesystem>
#include <nlohmann/json.hpp>

#include "models/description.h"
#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::hybrid_config_test {
namespace {

using enum LayerType;
using nlohmann::json;

constexpr ConfigOfFolder kQwen3Next("qwen3-next-fp32");

/// As config.json spells them.
json types(std::initializer_list<LayerType> layers) {
  json list = json::array();
  for (const LayerType type : layers) {
    list.push_back(type == kLinear ? kLinearAttention : kFullAttention);
  }
  return list;
}

std::map<std::string, ParameterSpec> rows_of(const ModelSpec& spec, const ParallelDims& degrees) {
  std::map<std::string, ParameterSpec> rows;
  for (const ParameterSpec& row : describe(spec, {}, degrees).parameters)
    rows.emplace(row.name, row);
  return rows;
}

TEST(Qwen3NextConfig, SaysWhichLayersKeepAStateAndWhatItIsMadeOf) {
  const ModelSpec spec = kQwen3Next.spec();
  EXPECT_EQ(spec.family, Family::kQwen3Next);
  EXPECT_EQ(spec.layer_types, (std::vector{kLinear, kFull, kLinear}));
  EXPECT_EQ(spec.delta_net, (DeltaNetSpec{.linear_conv_kernel_dim = 4,
                                          .linear_key_head_dim = 8,
                                          .linear_value_head_dim = 12,
                                          .linear_num_key_heads = 2,
                                          .linear_num_value_heads = 4}));
  EXPECT_EQ(spec.turned_dim(), 4);
  EXPECT_EQ(spec.moe->shared_intermediate_size, 12);
  EXPECT_TRUE(spec.moe->shared_gate);
  EXPECT_TRUE(spec.moe->norm_topk_prob);
  EXPECT_EQ(spec.moe->router_aux_loss_coef, 0.001);
}

TEST(Qwen3NextConfig, ContextParallelismIsRefusedByTheLayersWithAState) {
  EXPECT_REFUSED(kConfig, check_degrees(kQwen3Next.spec(), {.cp = 2}),
                 "context_parallel_degree: found 2 with layers 0, 2 of the gated delta rule");
  EXPECT_NO_THROW(check_degrees(kQwen3Next.spec(), {.context_parts = 4})) << "on one rank";
}

// transformers' Qwen3NextConfig, version 5.23.
TEST(Qwen3NextConfig, AbsentKeysAreTransformersDefaults) {
  const ModelSpec spec = kQwen3Next.spec_without(
      {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
       "linear_num_value_heads", "linear_value_head_dim", "head_dim", "num_key_value_heads",
       "max_position_embeddings", "partial_rotary_factor", "rope_theta", "moe_intermediate_size",
       "shared_expert_intermediate_size", "norm_topk_prob", "router_aux_loss_coef",
       "full_attention_interval"});
  EXPECT_EQ(spec.delta_net, DeltaNetSpec());
  EXPECT_EQ(spec.delta_net->key_size(), 2048);
  EXPECT_EQ(spec.delta_net->value_size(), 4096);
  EXPECT_EQ(spec.layer_types, (std::vector{kLinear, kLinear, kLinear}))
      << "the fourth is the first";
  EXPECT_EQ(spec.head_dim, 256);
  EXPECT_EQ(spec.num_key_value_heads, 2);
  EXPECT_EQ(spec.max_position_embeddings, 32768);
  EXPECT_EQ(spec.rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_EQ(spec.moe->moe_intermediate_size, 512);
  EXPECT_EQ(spec.moe->shared_intermediate_size, 512);
  EXPECT_TRUE(spec.moe->norm_topk_prob);
  EXPECT_EQ(spec.moe->router_aux_loss_coef, 0.001);
}

TEST(Qwen3NextConfig, EveryNthLayerIsFullWhereNoListSaysIt) {
  const auto of = [](int interval) {
    return kQwen3Next.spec({{"full_attention_interval", interval}}).layer_types;
  };
  EXPECT_EQ(of(1), (std::vector{kFull, kFull, kFull}));
  EXPECT_EQ(of(2), (std::vector{kLinear, kFull, kLinear}));
  EXPECT_EQ(of(3), (std::vector{kLinear, kLinear, kFull}));
  // A list that agrees, as newer files have it, and one alone.
  EXPECT_EQ(kQwen3Next.spec({{"layer_types", types({kLinear, kFull, kLinear})}}),
            kQwen3Next.spec());
  EXPECT_EQ(kQwen3Next
                .spec({{"full_attention_interval", nullptr},
                       {"layer_types", types({kFull, kLinear, kLinear})}})
                .layer_types,
            (std::vector{kFull, kLinear, kLinear}));
}

TEST(Qwen3NextConfig, WhatIsWrittenIsReadAsTheSame) {
  const json of_list{{"full_attention_interval", nullptr},
                     {"layer_types", types({kFull, kLinear, kLinear})}};
  kQwen3Next.expect_kept({json::object(),
                          of_list,
                          {{"full_attention_interval", 1}},
                          {{"full_attention_interval", 3}},
                          {{"linear_num_value_heads", 2}, {"linear_conv_kernel_dim", 3}},
                          {{"linear_key_head_dim", 6}, {"linear_value_head_dim", 10}},
                          {{"partial_rotary_factor", 1.0}, {"tie_word_embeddings", true}},
                          {{"decoder_sparse_step", 2}, {"norm_topk_prob", false}},
                          {{"mlp_only_layers", {1}}, {"shared_expert_intermediate_size", 8}},
                          {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}}}});
}

TEST(Qwen3NextConfig, ALayerListThatDoesNotFitIsRefusedByName) {
  kQwen3Next.expect_refused({{"layer_types", types({kLinear, kFull}), "layer_types: found ["},
                             {"layer_types", types({kLinear, kFull, kLinear, kLinear})},
                             {"layer_types", json::array()},
                             {"layer_types", kLinearAttention},
                             {"layer_types",
                              {kLinearAttention, "mamba", kLinearAttention},
                              "layer_types: found \"mamba\""},
                             {"layer_types",
                              {kLinearAttention, kSlidingAttention, kLinearAttention},
                              "layer_types: found \"sliding_attention\""},
                             {"layer_types", {0, 1, 0}},
                             {"full_attention_interval", 0},
                             {"full_attention_interval", -2},
                             {"full_attention_interval", 2.5},
                             {"full_attention_interval", "2"}});
  // With an interval of 2, as the folder has it.
  EXPECT_THAT(kQwen3Next.refusal({{"layer_types", types({kFull, kLinear, kLinear})}}),
              Says("layer_types", "full_attention_interval"));
}

TEST(Qwen3NextConfig, HeadsAndFiltersThatAreNoneAreRefusedByName) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  kQwen3Next.expect_refused({{"linear_num_value_heads", 3, "linear_num_value_heads: found 3"},
                             {"linear_num_value_heads", 1},
                             {"linear_num_value_heads", 0},
                             {"linear_num_value_heads", kHuge},
                             {"linear_num_key_heads", 0},
                             {"linear_num_key_heads", -2},
                             {"linear_key_head_dim", 0},
                             {"linear_key_head_dim", kHuge},
                             {"linear_value_head_dim", 0},
                             {"linear_value_head_dim", 1.5},
                             {"linear_conv_kernel_dim", 0},
                             {"linear_conv_kernel_dim", 1},
                             {"linear_conv_kernel_dim", 1 << 20},
                             {"partial_rotary_factor", 0.1},
                             {"use_sliding_window", true},
                             {"shared_expert_intermediate_size", 0}});
}

// Truth: transformers 5.24, which puts the family's part in place of an absent key only, and cannot
// build a model from a null inside of rope_parameters.
TEST(Qwen3NextConfig, ANullRotaryPartTurnsTheWholeHead) {
  EXPECT_EQ(kQwen3Next.spec({{"partial_rotary_factor", nullptr}}).rope.partial_rotary_factor, 1.0);
  EXPECT_EQ(kQwen3Next.spec_without({"partial_rotary_factor"}).rope.partial_rotary_factor, 0.25);
  json record{{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
  const auto found = [&] {
    return kQwen3Next.spec({{"partial_rotary_factor", nullptr}, {"rope_parameters", record}});
  };
  EXPECT_EQ(found().rope.partial_rotary_factor, 0.5);
  record["partial_rotary_factor"] = nullptr;
  EXPECT_REFUSED(kConfig, found(), "rope_parameters.partial_rotary_factor: found null");
}

TEST(Qwen3NextConfig, ANumberThatNoDoubleHoldsIsRefusedWithItsKeyAndByte) {
  EXPECT_REFUSED(kFormat, parse_spec(R"({"model_type": "qwen3_next", "rope_theta": 1e400})"),
                 "malformed JSON at byte 48, key 'rope_theta': number overflow parsing '1e400'");
}

// A rank has whole key heads, each with the value heads that it serves: rows of the projections
// stand in that order, channels of the convolution as all q, all k, all v.
TEST(Qwen3NextConfig, RanksOfTpShareKeyHeads) {
  const auto rows = rows_of(kQwen3Next.spec(), {.tp = 2});
  const std::string layer = "model.layers.0.linear_attn.";
  for (const auto& [name, shape] :
       {std::pair{"in_proj_qkvz.weight", std::vector<std::int64_t>{128, 32}},
        std::pair{"in_proj_ba.weight", std::vector<std::int64_t>{8, 32}},
        std::pair{"A_log", std::vector<std::int64_t>{4}},
        std::pair{"dt_bias", std::vector<std::int64_t>{4}}}) {
    const ParameterSpec& row = rows.at(layer + name);
    EXPECT_EQ(row.shape, shape) << name;
    EXPECT_EQ(to_string(row.layout), "tp 2 S(0), gradient S(0)") << name;
  }
  const ParameterSpec& filters = rows.at(layer + "conv1d.weight");
  EXPECT_EQ(filters.shape, (std::vector<std::int64_t>{80, 1, 4}));
  EXPECT_EQ(filters.layout.sections, (std::vector<std::int64_t>{16, 16, 48}));
  EXPECT_EQ(to_string(rows.at(layer + "norm.weight").layout), "tp 2 R, gradient P");
  EXPECT_EQ(to_string(rows.at(layer + "out_proj.weight").layout), "tp 2 S(1), gradient S(1)");
  EXPECT_EQ(rows.at("model.layers.1.self_attn.q_proj.weight").shape,
            (std::vector<std::int64_t>{128, 32}))
      << "a gate with each query";

  EXPECT_THAT(refusal_of(ErrorKind::kConfig, [] { describe(kQwen3Next.spec(), {}, {.tp = 4}); }),
              Says("tensor_parallel_degree: found 4", "linear_num_key_heads = 2"));
}

// Qwen3-Coder-Next's files hold 79,674,391,296 elements.
TEST(Qwen3NextConfig, TheSizesOfThePublishedModelAreRead) {
  const auto file =
      std::filesystem::path(TESSERA_CONFIGS) / "models" / "qwen3-next-80b-a3b" / "config.json";
  const ParsedSpec parsed = parse_spec(read_file(file));
  EXPECT_TRUE(parsed.warnings.empty());
  EXPECT_TRUE(parsed.ignored_keys.empty());
  const ModelSpec& spec = parsed.spec;
  EXPECT_EQ(std::ranges::count(spec.layer_types, kLinear), 36);
  EXPECT_TRUE(spec.is_linear(2));
  EXPECT_FALSE(spec.is_linear(3));
  EXPECT_EQ(spec.turned_dim(), 64);
  EXPECT_EQ(total_numel(describe(spec).parameters), 79'674'391'296);
}

}  // namespace
}  // namespace tessera::models::hybrid_config_test
