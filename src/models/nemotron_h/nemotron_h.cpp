// Nemotron-H and Nemotron 3: a layer is one part alone, after one norm: Mamba-2, experts, attention
// without rope, or an MLP; experts and MLPs have no gate and square the result of relu; the router
// is DeepSeek V3's. The layers that predict further tokens are left out.
//
// The part of each layer is named by hybrid_override_pattern, a letter each, in the hub's folders
// and by layers_block_type in those that transformers writes. Next: ../../nn/state/mamba.h.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

struct LayerPartName {
  LayerType part;
  char letter;               ///< in hybrid_override_pattern
  std::string_view word;     ///< in layers_block_type
  std::string_view earlier;  ///< there, in folders of older versions
};
constexpr LayerPartName kParts[] = {
    {LayerType::kLinear, 'M', "linear_attention", "mamba"},
    {LayerType::kExperts, 'E', "moe", "moe"},
    {LayerType::kFull, '*', "full_attention", "attention"},
    {LayerType::kMlp, '-', "mlp", "mlp"},
};

constexpr IntRange kMambaSize{1, 65536};
constexpr IntRange kMambaWidth{2, 64};
constexpr IntRange kMambaChunk{1, 65536};
constexpr NumberRange kLeastStep{0.0, 1.0};
constexpr NumberRange kMostStep{1e-30, 64.0};
constexpr NumberRange kStepFloor{0.0, 64.0};

std::vector<LayerType> parts_of_pattern(ConfigReader& keys, const std::string& pattern) {
  std::vector<LayerType> parts;
  for (const char letter : pattern) {
    const auto* const name = std::ranges::find(kParts, letter, &LayerPartName::letter);
    if (name == std::end(kParts)) {
      keys.refuse("hybrid_override_pattern",
                  "a letter for each layer: M (Mamba-2), E (experts), * (attention) or - (MLP)");
    }
    parts.push_back(name->part);
  }
  return parts;
}

std::vector<LayerType> parts_of_words(ConfigReader& keys, const nlohmann::json& words) {
  std::vector<LayerType> parts;
  const auto part_of_word = [](const nlohmann::json& word) {
    return std::ranges::find_if(kParts, [&](const LayerPartName& name) {
      return word == name.word || word == name.earlier;
    });
  };
  const bool all_known =
      words.is_array() && std::ranges::all_of(words, [&](const nlohmann::json& word) {
        return part_of_word(word) != std::end(kParts);
      });
  if (!all_known) {
    keys.refuse("layers_block_type",
                "a list of \"linear_attention\", \"moe\", \"full_attention\" and \"mlp\"");
  }
  for (const nlohmann::json& word : words) parts.push_back(part_of_word(word)->part);
  return parts;
}

/// Errors: kConfig where the keys that say it are missing, or say different things.
std::vector<LayerType> read_part_keys(ConfigReader& keys) {
  const auto pattern = keys.word("hybrid_override_pattern");
  const nlohmann::json* words = keys.take("layers_block_type");
  if (!pattern && words == nullptr) {
    keys.refuse("hybrid_override_pattern", "a letter for each layer, or layers_block_type");
  }
  std::vector<LayerType> parts;
  const char* key = words == nullptr ? "hybrid_override_pattern" : "layers_block_type";
  if (pattern) parts = parts_of_pattern(keys, *pattern);
  if (words != nullptr) {
    auto listed = parts_of_words(keys, *words);
    if (pattern && listed != parts) {
      keys.refuse("layers_block_type", "the layers of hybrid_override_pattern, or one of the two");
    }
    parts = std::move(listed);
  }
  if (parts.empty() || std::ssize(parts) > kLayers.max) {
    keys.refuse(key, concat("from ", kLayers.min, " to ", kLayers.max, " layers"));
  }
  const auto layers = keys.integer("num_hidden_layers", kLayers);
  if (layers && *layers != std::ssize(parts)) {
    keys.refuse("num_hidden_layers",
                concat(parts.size(), ", the number of layers that ", key, " names"));
  }
  return parts;
}

void read_layer_parts(ConfigReader& keys, ModelSpec& spec) {
  spec.layer_types = read_part_keys(keys);
  spec.num_hidden_layers = std::ssize(spec.layer_types);
}

std::string pattern_of(const ModelSpec& spec) {
  std::string pattern;
  for (const LayerType part : spec.layer_types) {
    pattern += std::ranges::find(kParts, part, &LayerPartName::part)->letter;
  }
  return pattern;
}

/// transformers does not read it: steps are at least time_step_min and have no upper limit.
void read_step_limit(ConfigReader& keys, ModelSpec& /*spec*/) {
  const auto infinity = nlohmann::json::object({{"__float__", "Infinity"}});  // bare_infinity.h
  keys.expect("time_step_limit", nlohmann::json::array({0.0, infinity}),
              "steps have no limit but time_step_min");
}

/// Attention turns nothing: what is said about rope is without effect.
void ignore_ropes(ConfigReader& keys, ModelSpec& /*spec*/, LeftKeys& /*left*/) {
  keys.ignore({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"});
}

void read_nemotron_h(ConfigReader& keys, ModelSpec& spec) {
  // Other names of the same in published folders.
  for (const char* key : {"norm_eps", "rms_norm_eps"}) {
    keys.expect(key, spec.rms_norm_eps, "layer_norm_epsilon says it");
  }
  keys.expect("attention_head_dim", spec.head_dim, "head_dim says it");
  const MambaSpec& mamba = *spec.mamba;
  if (mamba.mamba_num_heads % mamba.n_groups != 0) {
    keys.refuse("n_groups", concat("a divisor of mamba_num_heads = ", mamba.mamba_num_heads));
  }
  if (mamba.time_step_min == 0.0 && mamba.time_step_floor == 0.0) {
    keys.refuse("time_step_floor", "above 0, where time_step_min is 0");
  }
  check_routed_experts(keys, spec);
}

KeyRows mamba_rows() {
  return {
      row("chunk_size", &MambaSpec::chunk_size, kMambaChunk),
      row("conv_kernel", &MambaSpec::conv_kernel, kMambaWidth),
      ignored({"expand"}),  // the inner size is that of the heads
      row("mamba_head_dim", &MambaSpec::mamba_head_dim, kMambaSize),
      always("mamba_hidden_act", "silu", "the activation of the convolution"),
      row("mamba_num_heads", &MambaSpec::mamba_num_heads, kMambaSize),
      only("mamba_proj_bias", false, kNoBiases),
      ignored({"mamba_ssm_cache_dtype"}),  // states are fp32
      row("n_groups", &MambaSpec::n_groups, kMambaSize),
      row("ssm_state_size", &MambaSpec::ssm_state_size, kMambaSize),
      {"time_step_limit", read_step_limit},
      row("time_step_min", &MambaSpec::time_step_min, kLeastStep),
      row("time_step_max", &MambaSpec::time_step_max, kMostStep),
      row("time_step_floor", &MambaSpec::time_step_floor, kStepFloor),
      row("rescale_prenorm_residual", &MambaSpec::rescale_prenorm_residual),
      only("use_bias", false, kNoBiases),
      row("use_conv_bias", &MambaSpec::use_conv_bias),
      ignored({"use_mamba_kernels"}),
  };
}

KeyRows nemotron_expert_rows() {
  return joined({
      routed_expert_rows(),
      {
          {"first_k_dense_replace"},
          only("moe_latent_size", nullptr, "experts between two more products are not supported"),
          row("moe_shared_expert_intermediate_size", &MoeSpec::shared_intermediate_size),
          ignored({"moe_shared_expert_overlap"}),
          always("n_shared_experts", 1, "moe_shared_expert_intermediate_size is that of all"),
          ignored(
              {"mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers"}),
      },
  });
}

/// Rows of other decoders that this family has not, or under other names.
KeyRows rows_left_out() {
  return {{"hidden_act"}, {"rms_norm_eps"}, {"rope_scaling"}, {"rope_theta"}};
}

KeyRows nemotron_rows() {
  return {
      only("attention_bias", false, kNoBiases),
      only("hidden_dropout", 0.0, "dropout is not supported in training"),
      written({"hybrid_override_pattern", read_layer_parts}, pattern_of),
      row("layer_norm_epsilon", &ModelSpec::rms_norm_eps, kEps),
      always("mlp_hidden_act", "relu2", "the activation of the MLP"),
      written("num_hidden_layers", &ModelSpec::num_hidden_layers),
      ignored({"num_logits_to_keep"}),
      written("pad_token_id", &ModelSpec::pad_token_id),  // an absent one is not null
      only("residual_in_fp32", false, "the stream has the dtype of its layers"),
      only("tie_word_embeddings", false, "the head of this family has a matrix of its own"),
  };
}

/// transformers' names are those of files with another stem.
std::string name_in_nemotron_h(std::string_view name) {
  constexpr std::string_view kTheirs = "model.";
  if (name.starts_with("mtp.")) return {};
  return name.starts_with(kTheirs) ? concat("backbone.", name.substr(kTheirs.size()))
                                   : std::string(name);
}

}  // namespace

const FamilyTraits& nemotron_h_traits() {
  static const FamilyTraits traits{
      .model_type = "nemotron_h",
      .architecture = "NemotronHForCausalLM",
      .spec = {.family = Family::kNemotronH,
               .vocab_size = 131072,
               .hidden_size = 4096,
               .num_attention_heads = 32,
               .num_key_value_heads = 8,
               .head_dim = 128,
               .intermediate_size = 21504,
               .max_position_embeddings = 4096,
               .rms_norm_eps = 1e-5,
               .pad_token_id = 0,
               .bos_token_id = 1,
               .eos_token_ids = {2},
               .moe = MoeSpec{.num_experts = 8,
                              .experts_per_token = 2,
                              .moe_intermediate_size = 7688,
                              .shared_intermediate_size = 7688,
                              .scores = ExpertScores::kSigmoid,
                              .router_dtype = RouterDtype::kFloat32,
                              .norm_topk_prob = true,
                              .activation = ExpertActivation::kReluSquared},
               .mamba = MambaSpec{}},
      .rows = decoder_rows(
          joined({rows_left_out(), mamba_rows(), nemotron_expert_rows(), nemotron_rows()})),
      .read = read_nemotron_h,
      .read_ropes = ignore_ropes,
      .module_name = name_in_nemotron_h,
      .names = {.stem = "backbone",
                .embedding = "embeddings",
                .norm = "norm_f",
                .stem_in_transformers = "model"},
      .layer_keys = "hybrid_override_pattern or layers_block_type",
      .router_module = "gate",
      .mlp_module = "mixer",
      .moe_names = {.module = "mixer"},
      .pins = {.strict = {"e_score_correction_bias"},
               .under_float16 = {},
               .states = {"mixer.A_log", "mixer.D", "mixer.dt_bias"},
               .strict_of_routers = true},
      .norms = NormPlacement::kBeforeOnePart,
      .norm_rounds_once = true,
      .mlp_activation = MlpActivation::kReluSquared,
      .rope = false,
      .pads_embedding = false,
  };
  return traits;
}

}  // namespace tessera::models
