// FamilyTraits: the differences between model families, as data: one value a family, in its folder
// (qwen3/qwen3.cpp, llama/llama.cpp, ...).
//
// Decoder-only models of one block share the module of decoder.h and differ by these fields alone;
// a family with a module of its own has it in its folder (gemma4/gemma4_model.h). A new family adds
// a folder and a row of the registry, families.def. Next: families.def, model_spec.h.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_spec.h"

namespace tessera::models {

class ConfigReader;
struct LeftKeys;

/// Parameters that transformers' classes of a family keep in fp32, as patterns of whole dotted
/// components. A test compares them with the classes.
struct KeepInFloat32 {
  std::vector<std::string> strict;  ///< _keep_in_fp32_modules_strict: under every param_dtype
  std::vector<std::string> under_float16;  ///< _keep_in_fp32_modules: under float16 only
  /// _keep_in_fp32_modules_strict of NeMo Automodel's class, where transformers' has none: of
  /// routers, so of models with experts only.
  std::vector<std::string> routers = {};
  /// Parameters that decay the states of linear layers, in models with such layers: NeMo Automodel
  /// keeps them in fp32 (FP32_GDN_PARAM_NAMES), transformers' classes have no list of them.
  std::vector<std::string> states = {};
  /// `strict` applies to routers: a model of the family whose layers are all dense has none of it.
  bool strict_of_routers = false;
};

/// Where the norms of a layer are, relative to its attention and its MLP.
enum class NormPlacement : std::uint8_t {
  kBefore,  ///< on inputs: input_layernorm, post_attention_layernorm
  kAfter,   ///< on outputs: post_attention_layernorm, post_feedforward_layernorm
  kAround,  ///< both: those two, input_layernorm and pre_feedforward_layernorm
  /// One, on the input of the only part of a layer: a layer is attention (or has a state) or a
  /// feed-forward, "mixer", after its "norm".
  kBeforeOnePart,
};

/// The activation of a layer's MLP.
enum class MlpActivation : std::uint8_t {
  kSwiglu,       ///< up times SiLU of a gate
  kGeglu,        ///< up times GELU, in its tanh form, of a gate
  kReluSquared,  ///< the square of relu of up: there is no gate
};

/// Names in files of a decoder's parts outside its layers.
struct DecoderNames {
  std::string stem = "model";
  std::string embedding = "embed_tokens";  ///< inside it, as the norm
  std::string norm = "norm";
  std::string stem_in_transformers = {};  ///< where its class calls the stem otherwise
};

/// The names of a layer with experts and of an expert's tensors, where files hold one a projection.
struct MoeNames {
  std::string module = "mlp";
  std::string gate = "gate_proj.weight";
  std::string up = "up_proj.weight";
  std::string down = "down_proj.weight";
  /// The name of that module in transformers, where files call it otherwise; empty: as `module`.
  std::string module_in_transformers = {};
  /// transformers' experts do not say that their matrices are [in, out], so that peft takes them
  /// for [out, in]: its A is of the outputs, its B of the inputs.
  bool peft_swaps_factors = false;
  /// peft maps target_modules that end in gate_proj, up_proj or down_proj to the routed experts, be
  /// it those of a shared expert or of a dense MLP.
  bool peft_takes_mlp_for_experts = false;
};

/// A config.json whose text_config is the family's own.
struct Multimodal {
  std::string_view architecture;
  std::string_view model_type;
  std::vector<std::string_view> other_keys;  ///< of it that say nothing about the text model
  /// Makes the keys of its text_config those of the family's own; null = they are.
  void (*as_text_model)(const ConfigReader& keys, nlohmann::json& text) = nullptr;
};

/// A key of a config.json: how it is read, and how it is written. Rows that most families need are
/// made in spec_keys.h.
struct KeyRow {
  std::string_view key;
  std::function<void(ConfigReader& keys, ModelSpec& spec)> read =
      {};  ///< none: a function reads it
  std::function<void(const ModelSpec& spec, nlohmann::ordered_json& json)> write = {};
};
/// In the order in which they are read and written.
using KeyRows = std::vector<KeyRow>;

/// The additions of a family to the common reading of a config.json, its weights' names included.
struct FamilyTraits {
  std::string_view model_type;    ///< "qwen3"
  std::string_view architecture;  ///< "Qwen3ForCausalLM"
  /// Other names of the same classes in files ("kimi_k2"), which are read; `model_type` is written.
  std::vector<std::string_view> other_model_types = {};
  /// Holds what every model of the family has, and transformers' values for keys that are absent. A
  /// size of 0 has none; head_dim is hidden_size / num_attention_heads then, num_key_value_heads is
  /// num_attention_heads.
  ModelSpec spec;
  /// The rotary share of a head where the key is absent; none: the whole head, and no key changes
  /// that.
  std::optional<double> partial_rotary_factor = std::nullopt;
  KeyRows rows;
  /// Reads what no row can, after the rows and what all decoders have; null = nothing.
  void (*read)(ConfigReader& keys, ModelSpec& spec) = nullptr;
  /// The same for a model that is no decoder (decoder.h), from its rows on. `left` collects nested
  /// keys that were not used.
  void (*read_all)(ConfigReader& keys, Purpose purpose, ModelSpec& spec, LeftKeys& left) = nullptr;
  /// Reads the ropes of layers that have several, into rope and sliding_rope; keys that were not
  /// used go to `left`. Null = one rope for all.
  void (*read_ropes)(ConfigReader& keys, ModelSpec& spec, LeftKeys& left) = nullptr;
  /// ParsedSpec::prediction_layers of a config.json; null = such folders have none.
  std::int64_t (*read_prediction_layers)(ConfigReader& keys) = nullptr;
  /// A model of more than text that this is the text model of; module_name knows its names.
  std::optional<Multimodal> whole = std::nullopt;

  /// A name of the checkpoint (hub layout) -> the module's name; empty for a tensor that is no part
  /// of the model, which is left out then. Names of modules are themselves.
  std::string (*module_name)(std::string_view) = [](std::string_view name) {
    return std::string(name);
  };
  DecoderNames names = {};
  /// The keys that say which kind each layer is, where kinds differ in their tensors; for messages.
  std::string_view layer_keys = {};
  /// Name of the router inside `mlp`, of a family with a mixture of experts.
  std::string_view router_module = {};
  std::string_view mlp_module = "mlp";                ///< of a layer without experts
  std::string_view shared_module = "shared_experts";  ///< inside it, where there are some
  std::string_view shared_gate_module = "shared_expert_gate";
  MoeNames moe_names = {};
  KeepInFloat32 pins = {};
  /// The parts that are frozen where the config's model.freeze is not given.
  std::vector<std::string> frozen = {};

  // The parts of the decoder's layers.
  NormPlacement norms = NormPlacement::kBefore;
  bool norm_adds_one = false;       ///< norms multiply by 1 + weight
  bool norm_rounds_once = false;    ///< norms multiply by their weight before they round
  bool qk_norm = false;             ///< of queries and keys, per head, before rope
  bool qk_norm_over_heads = false;  ///< the q/k norm is of all heads together, not of each
  bool attention_sinks = false;     ///< one a head
  /// q_proj gives a gate after the query of each head; its sigmoid multiplies the head's result.
  bool attention_gate = false;
  /// Linear attention has one matrix for queries, keys and values, and one each for gates and
  /// rates.
  bool separate_delta_projections = false;
  bool output_bias = true;  ///< attention_bias holds for o_proj, too
  MlpActivation mlp_activation = MlpActivation::kSwiglu;
  bool rope = true;                ///< attention turns queries and keys by their positions
  bool scaled_embedding = false;   ///< times sqrt(hidden_size), rounded to the embedding's dtype
  bool pads_embedding = true;      ///< the row of pad_token_id has no gradient
  bool learned_positions = false;  ///< there are no others than max_position_embeddings
  /// q, k and v are rows of one matrix (qkv_proj), gate and up of another (gate_up_proj).
  bool fused_projections = false;
  bool transposed_linears = false;  ///< matrices are [in, out]; they get no adapters

  // Questions about a spec (model_spec.h); null = what most families answer.
  LayerAttention (*attention_of)(const ModelSpec& spec, std::int64_t layer) = nullptr;
  std::vector<std::int64_t> (*key_value_heads)(const ModelSpec& spec) = nullptr;
  std::optional<ImageTokens> (*image_tokens)(const ModelSpec& spec) = nullptr;
  /// The keys and values of dropout that training leaves out, as "attn_pdrop = 0.1"; empty where
  /// there is none. Null: what is not 0 is refused where it is read.
  std::string (*not_dropped)(const ModelSpec& spec) = nullptr;
};

const FamilyTraits& traits(Family family);
/// All of them, in the order of messages.
std::vector<const FamilyTraits*> families();

/// Whether a config.json is that of the model of more than text that the family's are part of.
bool is_whole_of(const FamilyTraits& family, const nlohmann::json& config);

/// The family of a config.json's `architectures` and `model_type` (either may be empty).
/// Errors: kConfig if unknown, or if both are given and disagree; the message lists the known ones.
const FamilyTraits& family_of(const std::vector<std::string>& architectures,
                              std::string_view model_type);

// One a folder.
#define TESSERA_FAMILY(enumerator, folder, build) const FamilyTraits& folder##_traits();
#include "models/families.def"

}  // namespace tessera::models
