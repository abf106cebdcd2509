// Rows of a mixture of experts that stands in the place of the MLP.
#include "models/family.h"
#include "models/table_builder.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

void add_bias(TableBuilder& table, std::string name, Shape shape) {
  table.matrix(std::move(name), std::move(shape), DecayClass::kBias);
  table.last().init = InitKind::kZeros;
  table.last().init_std = 0.0;
}

/// One parameter out of a tensor an expert and projection.
void add_stacked(TableBuilder& table, const std::string& name, const MoeSpec& moe,
                 const std::vector<const char*>& projections, Shape each) {
  Shape shape = each;
  shape.front() *= static_cast<std::int64_t>(projections.size());
  shape.insert(shape.begin(), moe.num_experts);
  table.matrix(name, std::move(shape));
  ParameterSpec& row = table.last();
  const std::string experts = name.substr(0, name.rfind('.'));
  for (std::int64_t e = 0; e < moe.num_experts; ++e) {
    for (const char* projection : projections) {
      row.stacked.push_back(concat(experts, ".", e, ".", projection, ".weight"));
    }
  }
  row.stacked_shape = std::move(each);
}

}  // namespace

void add_moe(TableBuilder& table, const ModelSpec& spec, const std::string& mlp) {
  const MoeSpec& moe = *spec.moe;
  const std::int64_t count = moe.num_experts;
  const std::int64_t inner = moe.moe_intermediate_size;
  const std::int64_t hidden = spec.hidden_size;
  const std::string router = concat(mlp, ".", traits(spec.family).router_module);
  table.matrix(router + ".weight", {count, hidden});
  if (moe.router_bias) table.matrix(router + ".bias", {count}, DecayClass::kBias);
  const std::string gate_up = mlp + ".experts.gate_up_proj";
  const std::string down = mlp + ".experts.down_proj";
  if (moe.layout == ExpertLayout::kOutIn) {
    add_stacked(table, gate_up, moe, {"gate_proj", "up_proj"}, {inner, hidden});
    add_stacked(table, down, moe, {"down_proj"}, {hidden, inner});
  } else {
    table.matrix(gate_up, {count, hidden, 2 * inner});
    table.matrix(down, {count, inner, hidden});
  }
  if (moe.expert_bias) {
    add_bias(table, gate_up + "_bias", {count, 2 * inner});
    add_bias(table, down + "_bias", {count, hidden});
  }
  if (moe.shared_intermediate_size == 0) return;
  const std::string shared = mlp + ".shared_experts.";
  table.linear(shared + "gate_proj", moe.shared_intermediate_size, hidden, false);
  table.linear(shared + "up_proj", moe.shared_intermediate_size, hidden, false);
  table.linear(shared + "down_proj", hidden, moe.shared_intermediate_size, false);
}

}  // namespace tessera::models
