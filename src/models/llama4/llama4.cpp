// The text model of Llama 4 (Scout, Maverick): attention in chunks, every few layers without rope
// and with queries that grow warmer with their position; experts in every n-th layer, whose one
// weight multiplies what goes in, and a shared one.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Older configs have a number there; 4 in the published ones.
void read_temperature(ConfigReader& keys, ModelSpec& spec) {
  const nlohmann::json* value = keys.take("attn_temperature_tuning");
  if (value == nullptr) return;
  spec.chunked->attn_temperature_tuning =
      value->is_number_integer() ? *value != 0 : *keys.boolean("attn_temperature_tuning");
}

void read_chunked_layers(ConfigReader& keys, ModelSpec& spec) {
  for (const bool has_rope : read_rope_layers(keys, spec.num_hidden_layers)) {
    spec.layer_types.push_back(has_rope ? LayerType::kChunked : LayerType::kFull);
  }
  const nlohmann::json* types = keys.take("layer_types");
  if (types == nullptr) return;
  bool agree = types->is_array() && types->size() == spec.layer_types.size();
  for (std::size_t i = 0; agree && i < spec.layer_types.size(); ++i) {
    const bool chunked = spec.layer_types[i] == LayerType::kChunked;
    agree = (*types)[i] == (chunked ? kChunkedAttention : kFullAttention);
  }
  if (!agree) {
    keys.refuse("layer_types", concat("\"", kChunkedAttention, "\" for layers with rope, \"",
                                      kFullAttention, "\" for those without"));
  }
}

/// Every n-th, or those of a list.
void read_moe_layers(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = *spec.moe;
  const nlohmann::json* list = keys.take("moe_layers");
  if (list == nullptr) return;
  std::vector<bool> has_experts(static_cast<std::size_t>(spec.num_hidden_layers), false);
  bool are_layers = list->is_array();
  for (std::size_t i = 0; are_layers && i < list->size(); ++i) {
    const nlohmann::json& layer = (*list)[i];
    are_layers = layer.is_number_integer() && layer >= 0 && layer < spec.num_hidden_layers;
    if (are_layers) has_experts[layer.get<std::size_t>()] = true;
  }
  if (!are_layers) {
    keys.refuse("moe_layers", concat("a list of layers, 0 to ", spec.num_hidden_layers - 1));
  }
  const auto is_nth = [&](std::size_t layer) {
    return (static_cast<std::int64_t>(layer) + 1) % moe.sparse_step == 0;
  };
  for (std::size_t i = 0; i < has_experts.size(); ++i) {
    if (has_experts[i] && !is_nth(i)) moe.sparse_step = 1;
  }
  for (std::size_t i = 0; i < has_experts.size(); ++i) {
    if (!has_experts[i] && is_nth(i)) moe.mlp_only_layers.push_back(static_cast<std::int64_t>(i));
  }
}

void read_llama4(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = *spec.moe;
  row("num_experts_per_tok", &MoeSpec::experts_per_token, {1, moe.num_experts}).read(keys, spec);
  // The file's intermediate_size is that of an expert, of the shared one, too.
  moe.shared_intermediate_size = moe.moe_intermediate_size;
  read_chunked_layers(keys, spec);
  read_moe_layers(keys, spec);
}

Json rope_layers(const ModelSpec& spec) {
  auto ropes = Json::array();
  for (const LayerType type : spec.layer_types) {
    ropes.push_back(type == LayerType::kChunked ? 1 : 0);
  }
  return ropes;
}

/// Names in folders of the whole model.
std::string name_in_llama4(std::string_view name) {
  constexpr std::string_view kText = "language_model.";
  if (name.starts_with("vision_model.") || name.starts_with("multi_modal_projector.")) return {};
  return std::string(name.starts_with(kText) ? name.substr(kText.size()) : name);
}

}  // namespace

const FamilyTraits& llama4_traits() {
  static const FamilyTraits traits{
      .model_type = "llama4_text",
      .architecture = "Llama4ForCausalLM",
      .spec = {.family = Family::kLlama4,
               .num_key_value_heads = 8,
               .head_dim = 128,
               .intermediate_size = 16384,
               .max_position_embeddings = 131072,
               .rms_norm_eps = 1e-5,
               .rope = {.theta = 500000.0},
               .moe = MoeSpec{.experts_per_token = 1,
                              .scores = ExpertScores::kSigmoidOfChosen,
                              .scores_before_experts = true,
                              .layout = ExpertLayout::kInOut,
                              .router_aux_loss_coef = 0.001},
               .chunked = ChunkedSpec{.attention_chunk_size = 8192}},
      .rows = decoder_rows({
          size("attention_chunk_size", &ChunkedSpec::attention_chunk_size),
          row("attn_scale", &ChunkedSpec::attn_scale, {0.0, 1e3}),
          written({"attn_temperature_tuning", read_temperature},
                  [](const ModelSpec& spec) { return spec.chunked->attn_temperature_tuning; }),
          row("floor_scale", &ChunkedSpec::floor_scale),
          row("interleave_moe_layer_step", &MoeSpec::sparse_step, kLayers),
          size("intermediate_size", &MoeSpec::moe_intermediate_size),
          row("intermediate_size_mlp", &ModelSpec::intermediate_size),
          {"layer_types"},
          written({"moe_layers"},
                  [](const ModelSpec& spec) { return routed_experts(spec).layers; }),
          written({"no_rope_layers"}, rope_layers),
          written("num_experts_per_tok", &MoeSpec::experts_per_token),
          size("num_local_experts", &MoeSpec::num_experts, {1, 4096}),
          said("output_router_logits", false),
          row("router_aux_loss_coef", &MoeSpec::router_aux_loss_coef, kAuxLoss),
          always("router_jitter_noise", 0.0, "routers see what is there"),
          row("use_qk_norm", &ChunkedSpec::use_qk_norm),
          // transformers has no use for these either.
          ignored({"for_llm_compressor", "cache_implementation"}),
      }),
      .read = read_llama4,
      .whole = Multimodal{.architecture = "Llama4ForConditionalGeneration",
                          .model_type = "llama4",
                          .other_keys = {"boi_token_index", "eoi_token_index", "image_token_index",
                                         "boi_token_id", "eoi_token_id", "image_token_id"}},
      .module_name = name_in_llama4,
      .router_module = "router",
      .mlp_module = "feed_forward",
      .shared_module = "shared_expert",
      .moe_names = {.module = "feed_forward", .peft_swaps_factors = true},
  };
  return traits;
}

}  // namespace tessera::models
