#include "models/parameter_table.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::models {
namespace {

using Shape = std::vector<std::int64_t>;

/// Collects rows for one unit after the other.
class Table {
 public:
  explicit Table(double init_std) : init_std_(init_std) {}

  void begin_unit(std::string unit) { unit_ = std::move(unit); }

  void matrix(std::string name, Shape shape, DecayClass decay = DecayClass::kMatrix) {
    add({.name = std::move(name),
         .shape = std::move(shape),
         .init_std = init_std_,
         .decay = decay});
  }
  void norm(std::string name, std::int64_t size) {
    add({.name = std::move(name),
         .shape = {size},
         .init = InitKind::kOnes,
         .decay = DecayClass::kNorm});
  }
  void linear(const std::string& module, std::int64_t out, std::int64_t in, bool bias) {
    matrix(module + ".weight", {out, in});
    if (!bias) return;
    add({.name = module + ".bias",
         .shape = {out},
         .init = InitKind::kZeros,
         .decay = DecayClass::kBias});
  }
  ParameterSpec& last() { return rows_.back(); }
  std::vector<ParameterSpec> rows() && { return std::move(rows_); }

 private:
  void add(ParameterSpec row) {
    row.unit = unit_;
    rows_.push_back(std::move(row));
  }

  double init_std_;
  std::string unit_;
  std::vector<ParameterSpec> rows_;
};

void add_layer(Table& table, const ModelSpec& spec, const std::string& layer) {
  table.begin_unit(layer);
  const std::string attention = layer + ".self_attn.";
  table.linear(attention + "q_proj", spec.q_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "k_proj", spec.kv_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "v_proj", spec.kv_size(), spec.hidden_size, spec.attention_bias);
  table.linear(attention + "o_proj", spec.hidden_size, spec.q_size(), spec.attention_bias);
  if (spec.qk_norm()) {
    table.norm(attention + "q_norm.weight", spec.head_dim);
    table.norm(attention + "k_norm.weight", spec.head_dim);
  }
  const std::string mlp = layer + ".mlp.";
  table.linear(mlp + "gate_proj", spec.intermediate_size, spec.hidden_size, spec.mlp_bias);
  table.linear(mlp + "up_proj", spec.intermediate_size, spec.hidden_size, spec.mlp_bias);
  table.linear(mlp + "down_proj", spec.hidden_size, spec.intermediate_size, spec.mlp_bias);
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
  Table table(spec.initializer_range);
  const Shape embedding{spec.vocab_size, spec.hidden_size};
  table.begin_unit("model.embed_tokens");
  table.matrix("model.embed_tokens.weight", embedding, DecayClass::kEmbedding);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    add_layer(table, spec, concat("model.layers.", i));
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

std::int64_t total_numel(const std::vector<ParameterSpec>& table) {
  std::int64_t total = 0;
  for (const ParameterSpec& row : table) {
    if (row.tied_to.empty()) total += row.numel();
  }
  return total;
}

}  // namespace tessera::models
