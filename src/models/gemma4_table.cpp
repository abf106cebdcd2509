#include "models/table_builder.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kText = "model.language_model.";
constexpr const char* kTower = "model.vision_tower.";

void add_norms(TableBuilder& table, const std::string& layer, std::int64_t size) {
  for (const char* name : {"input_layernorm", "post_attention_layernorm",
                           "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
    table.norm(concat(layer, ".", name, ".weight"), size);
  }
}

void add_experts(TableBuilder& table, const std::string& layer, std::int64_t hidden,
                 const Gemma4Experts& moe) {
  for (const char* name : {"post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
                           "pre_feedforward_layernorm_2"}) {
    table.norm(concat(layer, ".", name, ".weight"), hidden);
  }
  table.norm(layer + ".router.scale", hidden);
  table.norm(layer + ".router.per_expert_scale", moe.num_experts);
  table.linear(layer + ".router.proj", moe.num_experts, hidden, false);
  table.matrix(layer + ".experts.gate_up_proj",
               {moe.num_experts, 2 * moe.moe_intermediate_size, hidden});
  table.matrix(layer + ".experts.down_proj", {moe.num_experts, hidden, moe.moe_intermediate_size});
}

void add_text_layer(TableBuilder& table, const ModelSpec& spec, std::size_t number) {
  const Gemma4Layer& own = spec.gemma4->layers[number];
  const std::string layer = concat(kText, "layers.", number);
  table.begin_unit(layer);
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t q_size = spec.num_attention_heads * own.head_dim;
  const std::int64_t kv_size = own.num_key_value_heads * own.head_dim;
  const std::string attention = layer + ".self_attn.";
  table.linear(attention + "q_proj", q_size, hidden, false);
  table.linear(attention + "k_proj", kv_size, hidden, false);
  if (!own.key_is_value) table.linear(attention + "v_proj", kv_size, hidden, false);
  table.linear(attention + "o_proj", hidden, q_size, false);
  table.norm(attention + "q_norm.weight", own.head_dim);
  table.norm(attention + "k_norm.weight", own.head_dim);
  const std::string mlp = layer + ".mlp.";
  table.linear(mlp + "gate_proj", spec.intermediate_size, hidden, false);
  table.linear(mlp + "up_proj", spec.intermediate_size, hidden, false);
  table.linear(mlp + "down_proj", hidden, spec.intermediate_size, false);
  add_norms(table, layer, hidden);
  if (spec.gemma4->experts) add_experts(table, layer, hidden, *spec.gemma4->experts);
}

void add_vision(TableBuilder& table, const Gemma4Vision& vision) {
  const std::int64_t hidden = vision.hidden_size;
  const std::string front = concat(kTower, "patch_embedder");
  table.begin_unit(front);
  table.ones(front + ".position_embedding_table", {2, vision.position_embedding_size, hidden});
  table.linear(front + ".input_proj", hidden, 3 * vision.patch_size * vision.patch_size, false);
  const std::int64_t q_size = vision.num_attention_heads * vision.head_dim;
  const std::int64_t kv_size = vision.num_key_value_heads * vision.head_dim;
  for (std::int64_t i = 0; i < vision.num_hidden_layers; ++i) {
    const std::string layer = concat(kTower, "encoder.layers.", i);
    table.begin_unit(layer);
    const std::string attention = layer + ".self_attn.";
    table.linear(attention + "q_proj.linear", q_size, hidden, false);
    table.linear(attention + "k_proj.linear", kv_size, hidden, false);
    table.linear(attention + "v_proj.linear", kv_size, hidden, false);
    table.linear(attention + "o_proj.linear", hidden, q_size, false);
    table.norm(attention + "q_norm.weight", vision.head_dim);
    table.norm(attention + "k_norm.weight", vision.head_dim);
    const std::string mlp = layer + ".mlp.";
    table.linear(mlp + "gate_proj.linear", vision.intermediate_size, hidden, false);
    table.linear(mlp + "up_proj.linear", vision.intermediate_size, hidden, false);
    table.linear(mlp + "down_proj.linear", hidden, vision.intermediate_size, false);
    add_norms(table, layer, hidden);
  }
}

}  // namespace

void add_gemma4(TableBuilder& table, const ModelSpec& spec) {
  if (spec.gemma4->vision) {
    add_vision(table, *spec.gemma4->vision);
    table.begin_unit("model.embed_vision");
    table.linear("model.embed_vision.embedding_projection", spec.hidden_size,
                 spec.gemma4->vision->hidden_size, false);
  }
  const Shape embedding{spec.vocab_size, spec.hidden_size};
  const std::string tokens = concat(kText, "embed_tokens");
  table.begin_unit(tokens);
  table.matrix(tokens + ".weight", embedding, DecayClass::kEmbedding);
  for (std::size_t i = 0; i < spec.gemma4->layers.size(); ++i) add_text_layer(table, spec, i);
  table.begin_unit("head");
  table.norm(concat(kText, "norm.weight"), spec.hidden_size);
  table.matrix("lm_head.weight", embedding);
  if (spec.tie_word_embeddings) {
    table.last().tied_to = tokens + ".weight";
    table.last().decay = DecayClass::kEmbedding;
  }
}

std::vector<BufferSpec> gemma4_buffers(const ModelSpec& spec) {
  std::vector<BufferSpec> rows;
  const auto& vision = spec.gemma4->vision;
  if (vision && vision->standardize) {
    rows.push_back({concat(kTower, "std_bias"), {vision->hidden_size}, InitKind::kZeros});
    rows.push_back({concat(kTower, "std_scale"), {vision->hidden_size}, InitKind::kOnes});
  }
  for (std::size_t i = 0; i < spec.gemma4->layers.size(); ++i) {
    rows.push_back({concat(kText, "layers.", i, ".layer_scalar"), {1}, InitKind::kOnes});
  }
  return rows;
}

}  // namespace tessera::models
