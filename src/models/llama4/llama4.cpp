// The text model of Llama 4 (Scout, Maverick): attention in chunks, every few layers without rope and
// with queries that grow warmer with their position; experts in every n-th layer, whose one weight
// multiplies what goes in, beside a shared one.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// Older configs have a number there; 4 in the published ones.
bool read_temperature(ConfigReader& keys) {
  const nlohmann::json* value = keys.take("attn_temperature_tuning");
  if (value == nullptr) return true;
  if (value->is_number_integer()) return *value != 0;
  return keys.boolean("attn_temperature_tuning").value_or(true);
}

/// What each layer is by no_rope_layers: 1 where it has rope. An empty list is as good as none.
std::vector<LayerType> types_by_rope(ConfigReader& keys, std::int64_t layers) {
  const std::int64_t interval = keys.integer("no_rope_layer_interval", kLayers).value_or(4);
  std::vector<LayerType> types;
  const nlohmann::json* list = keys.take("no_rope_layers");
  if (list == nullptr || (list->is_array() && list->empty())) {
    for (std::int64_t i = 0; i < layers; ++i) {
      types.push_back((i + 1) % interval == 0 ? LayerType::kFull : LayerType::kChunked);
    }
    return types;
  }
  const bool is_one_each =
      list->is_array() && std::cmp_equal(list->size(), layers) &&
      std::ranges::all_of(*list, [](const auto& each) { return each == 0 || each == 1; });
  if (!is_one_each) keys.refuse("no_rope_layers", concat("a list of ", layers, " times 0 or 1"));
  for (const nlohmann::json& each : *list) {
    types.push_back(each == 1 ? LayerType::kChunked : LayerType::kFull);
  }
  return types;
}

void read_chunked_layers(ConfigReader& keys, ModelSpec& spec) {
  spec.layer_types = types_by_rope(keys, spec.num_hidden_layers);
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
  moe.sparse_step = keys.integer("interleave_moe_layer_step", kLayers).value_or(1);
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
  if (!keys.contains("rms_norm_eps")) spec.rms_norm_eps = 1e-5;
  ChunkedSpec& chunked = spec.chunked.emplace();
  chunked.attention_chunk_size =
      keys.contains("attention_chunk_size") ? required(keys, "attention_chunk_size", kSize) : 8192;
  chunked.use_qk_norm = keys.boolean("use_qk_norm").value_or(true);
  chunked.attn_temperature_tuning = read_temperature(keys);
  chunked.attn_scale = keys.number("attn_scale", {0.0, 1e3}).value_or(0.1);
  chunked.floor_scale = keys.integer("floor_scale", kSize).value_or(8192);
  read_chunked_layers(keys, spec);

  MoeSpec& moe = spec.moe.emplace();
  moe.num_experts = required(keys, "num_local_experts", {1, 4096});
  moe.experts_per_token = keys.integer("num_experts_per_tok", {1, moe.num_experts}).value_or(1);
  // The file's intermediate_size is that of an expert, of the shared one, too.
  moe.moe_intermediate_size = spec.intermediate_size;
  moe.shared_intermediate_size = spec.intermediate_size;
  spec.intermediate_size = keys.integer("intermediate_size_mlp", kSize).value_or(16384);
  moe.scores = ExpertScores::kSigmoidOfChosen;
  moe.scores_before_experts = true;
  moe.layout = ExpertLayout::kInOut;
  read_moe_layers(keys, spec);
  moe.router_aux_loss_coef = keys.number("router_aux_loss_coef", {0.0, 1e6}).value_or(0.001);
  keys.expect("router_jitter_noise", 0.0, "routers see what is there");
  // transformers computes no auxiliary loss for this family, and has no other use for these.
  keys.ignore({"output_router_logits", "for_llm_compressor", "cache_implementation"});
}

void write_llama4(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const ChunkedSpec& chunked = *spec.chunked;
  const MoeSpec& moe = *spec.moe;
  json["attention_chunk_size"] = chunked.attention_chunk_size;
  json["attn_scale"] = chunked.attn_scale;
  json["attn_temperature_tuning"] = chunked.attn_temperature_tuning;
  json["floor_scale"] = chunked.floor_scale;
  json["interleave_moe_layer_step"] = moe.sparse_step;
  json["intermediate_size"] = moe.moe_intermediate_size;
  json["intermediate_size_mlp"] = spec.intermediate_size;
  json["moe_layers"] = routed_experts(spec).layers;
  auto ropes = nlohmann::ordered_json::array();
  for (const LayerType type : spec.layer_types) {
    ropes.push_back(type == LayerType::kChunked ? 1 : 0);
  }
  json["no_rope_layers"] = ropes;
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["num_local_experts"] = moe.num_experts;
  json["output_router_logits"] = false;
  json["router_aux_loss_coef"] = moe.router_aux_loss_coef;
  json["router_jitter_noise"] = 0.0;
  json["use_qk_norm"] = chunked.use_qk_norm;
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
      .family = Family::kLlama4,
      .model_type = "llama4_text",
      .architecture = "Llama4ForCausalLM",
      .default_head_dim = 128,
      .default_num_key_value_heads = 8,
      .default_max_position_embeddings = 131072,
      .default_rope_theta = 500000.0,
      .has_mlp_bias = false,
      .own_keys = {"layer_types"},
      .pins = {},
      .frozen = {},
      .module_name = name_in_llama4,
      .router_module = "router",
      .mlp_module = "feed_forward",
      .shared_module = "shared_expert",
      .read = read_llama4,
      .write = write_llama4,
      .moe_names = {.module = "feed_forward", .peft_swaps_factors = true},
      .whole = Multimodal{.architecture = "Llama4ForConditionalGeneration",
                          .model_type = "llama4",
                          .keys_beside = {"boi_token_index", "eoi_token_index", "image_token_index",
                                          "boi_token_id", "eoi_token_id", "image_token_id"}},
  };
  return traits;
}

}  // namespace tessera::models
