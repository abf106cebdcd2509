#include "models/parameter_table.h"

#include <set>
#include <utility>

#include "models/table_builder.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

void add_attention(TableBuilder& table, const ModelSpec& spec, const std::string& layer) {
  const std::string attention = layer + ".self_attn.";
  // A module's own parameters come before those of its layers.
  if (spec.attention_sinks()) {
    table.matrix(attention + "sinks", {spec.num_attention_heads}, DecayClass::kBias);
  }
  table.linear(attention + "q_proj", spec.q_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "k_proj", spec.kv_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "v_proj", spec.kv_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "o_proj", spec.hidden_size, spec.q_size(), spec.attention_bias);
  if (spec.qk_norm()) {
    table.norm(attention + "q_norm.weight", spec.head_dim);
    table.norm(attention + "k_norm.weight", spec.head_dim);
  }
}

void add_mlp(TableBuilder& table, const ModelSpec& spec, const std::string& layer) {
  const std::string mlp = layer + ".mlp.";
  table.linear(mlp + "gate_proj", spec.intermediate_size, spec.hidden_size, spec.mlp_bias);
  table.linear(mlp + "up_proj", spec.intermediate_size, spec.hidden_size, spec.mlp_bias);
  table.linear(mlp + "down_proj", spec.hidden_size, spec.intermediate_size, spec.mlp_bias);
}

void add_layer(TableBuilder& table, const ModelSpec& spec, std::int64_t number) {
  const std::string layer = concat("model.layers.", number);
  table.begin_unit(layer);
  if (spec.mla) {
    add_mla(table, spec, layer + ".self_attn");
  } else {
    add_attention(table, spec, layer);
  }
  if (spec.is_moe(number)) {
    add_moe(table, spec, layer + ".mlp");
  } else {
    add_mlp(table, spec, layer);
  }
  table.norm(layer + ".input_layernorm.weight", spec.hidden_size);
  table.norm(layer + ".post_attention_layernorm.weight", spec.hidden_size);
}

}  // namespace

std::int64_t ParameterSpec::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::vector<ParameterSpec> parameter_table(const ModelSpec& spec) {
  TableBuilder table(spec.initializer_range);
  if (spec.family == Family::kGemma4) {
    add_gemma4(table, spec);
    return std::move(table).rows();
  }
  const std::vector<std::int64_t> embedding{spec.vocab_size, spec.hidden_size};
  table.begin_unit("model.embed_tokens");
  table.matrix("model.embed_tokens.weight", embedding, DecayClass::kEmbedding);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    add_layer(table, spec, i);
  }
  table.begin_unit("head");
  table.norm("model.norm.weight", spec.hidden_size);
  table.matrix("lm_head.weight", embedding);
  if (spec.tie_word_embeddings) {
    table.last().tied_to = "model.embed_tokens.weight";
    table.last().decay = DecayClass::kEmbedding;
  }
  return std::move(table).rows();
}

std::vector<std::string> sharding_units(const ModelSpec& spec) {
  std::set<std::string> of_root{"model.embed_vision"};
  const std::vector<ParameterSpec> table = parameter_table(spec);
  for (const ParameterSpec& alias : table) {
    if (alias.tied_to.empty()) continue;
    of_root.insert(alias.unit);
    for (const ParameterSpec& row : table) {
      if (row.name == alias.tied_to) of_root.insert(row.unit);
    }
  }
  std::vector<std::string> units;
  for (const ParameterSpec& row : table) {
    if (of_root.contains(row.unit) || (!units.empty() && units.back() == row.unit)) continue;
    units.push_back(row.unit);
  }
  return units;
}

std::vector<BufferSpec> buffer_table(const ModelSpec& spec) {
  return spec.family == Family::kGemma4 ? gemma4_buffers(spec) : std::vector<BufferSpec>{};
}

RoutedExperts routed_experts(const ModelSpec& spec) {
  if (spec.moe) {
    RoutedExperts routed{spec.moe->num_experts, spec.moe->experts_per_token, {}};
    for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
      if (spec.moe->is_moe(i)) routed.layers.push_back(i);
    }
    return routed;
  }
  if (!spec.gemma4 || !spec.gemma4->experts) return {};
  RoutedExperts routed{spec.gemma4->experts->num_experts, spec.gemma4->experts->top_k_experts, {}};
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) routed.layers.push_back(i);
  return routed;
}

std::int64_t active_numel(const ModelSpec& spec, const ParameterSpec& row) {
  const bool is_head = !row.tied_to.empty();
  if (row.decay == DecayClass::kEmbedding && !is_head) return 0;
  if (row.name.starts_with("model.vision_tower.") || row.name.starts_with("model.embed_vision.")) {
    return 0;
  }
  if (row.name.find(".experts.") == std::string::npos) return row.numel();
  const RoutedExperts experts = routed_experts(spec);
  return row.numel() / experts.experts * experts.experts_per_token;
}

std::int64_t total_numel(const std::vector<ParameterSpec>& table) {
  std::int64_t total = 0;
  for (const ParameterSpec& row : table) {
    if (row.tied_to.empty()) total += row.numel();
  }
  return total;
}

}  // namespace tessera::models
