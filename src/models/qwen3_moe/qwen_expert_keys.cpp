#include "models/qwen3_moe/qwen_expert_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mlp_only_layers(ConfigReader& keys, ModelSpec& spec) {
  spec.moe->mlp_only_layers = keys.integers("mlp_only_layers", {0, spec.num_hidden_layers - 1});
  std::ranges::sort(spec.moe->mlp_only_layers);
}

}  // namespace

KeyRows qwen_expert_rows() {
  return {
      row("decoder_sparse_step", &MoeSpec::sparse_step, kLayers),
      written({"mlp_only_layers", read_mlp_only_layers},
              [](const ModelSpec& spec) { return spec.moe->mlp_only_layers; }),
      size("moe_intermediate_size", &MoeSpec::moe_intermediate_size),
      row("norm_topk_prob", &MoeSpec::norm_topk_prob),
      written("num_experts", &MoeSpec::num_experts),
      written("num_experts_per_tok", &MoeSpec::experts_per_token),
      row("output_router_logits", &MoeSpec::output_router_logits),
      row("router_aux_loss_coef", &MoeSpec::router_aux_loss_coef, kAuxLoss),
  };
}

}  // namespace tessera::models
