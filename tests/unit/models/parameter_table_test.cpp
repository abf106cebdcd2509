#include "models/parameter_table.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "unit/models/small_spec.h"

namespace tessera::models::parameter_table_test {
namespace {

std::map<std::string, ParameterSpec> by_name(const std::vector<ParameterSpec>& table) {
  std::map<std::string, ParameterSpec> rows;
  for (const ParameterSpec& row : table) rows.emplace(row.name, row);
  return rows;
}

TEST(ParameterTable, Qwen3HasHuggingFaceNamesAndShapes) {
  const auto table = parameter_table(small(Family::kQwen3));
  const auto rows = by_name(table);
  EXPECT_EQ(rows.size(), table.size());
  EXPECT_EQ(table.size(), 1u + 2u * 11u + 2u);
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(table.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(table.back().name, "lm_head.weight");
  EXPECT_EQ(rows.at("model.layers.1.self_attn.q_proj.weight").shape, (Shape{64, 32}));
  EXPECT_EQ(rows.at("model.layers.1.self_attn.v_proj.weight").shape, (Shape{32, 32}));
  EXPECT_EQ(rows.at("model.layers.1.self_attn.o_proj.weight").shape, (Shape{32, 64}));
  EXPECT_EQ(rows.at("model.layers.0.self_attn.k_norm.weight").shape, (Shape{16}));
  EXPECT_EQ(rows.at("model.layers.0.mlp.down_proj.weight").shape, (Shape{32, 80}));
  EXPECT_EQ(rows.at("model.norm.weight").init, InitKind::kOnes);
  EXPECT_EQ(rows.at("model.norm.weight").decay, DecayClass::kNorm);
  EXPECT_EQ(rows.at("model.norm.weight").unit, "head");
  EXPECT_EQ(rows.at("model.layers.1.mlp.up_proj.weight").unit, "model.layers.1");
  EXPECT_EQ(rows.at("model.layers.1.mlp.up_proj.weight").init_std, 0.02);
}

TEST(ParameterTable, BiasesAndTiedHeadFollowTheSpec) {
  ModelSpec spec = small(Family::kLlama);
  spec.attention_bias = true;
  spec.mlp_bias = true;
  spec.tie_word_embeddings = true;
  const auto table = parameter_table(spec);
  const auto rows = by_name(table);
  EXPECT_EQ(rows.count("model.layers.0.self_attn.q_norm.weight"), 0u);
  EXPECT_EQ(rows.at("model.layers.0.self_attn.o_proj.bias").init, InitKind::kZeros);
  EXPECT_EQ(rows.at("model.layers.0.mlp.gate_proj.bias").decay, DecayClass::kBias);
  EXPECT_EQ(rows.at("lm_head.weight").tied_to, "model.embed_tokens.weight");
  std::int64_t sum = 0;
  for (const ParameterSpec& row : table) sum += row.numel();
  EXPECT_EQ(total_numel(table), sum - 128 * 32);
}

}  // namespace
}  // namespace tessera::models::parameter_table_test
