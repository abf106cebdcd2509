// ModelSpec: the mathematics of a published language model as its files give it, as a value; read,
// written, and asked which numbers of ranks can share it.
//
// Every key of config.json is used, known to change nothing (keys/known_keys.h), or refused with
// its value, so that a model is never trained as something else than it is. Both spellings are
// read, alone or together where they agree: rope_parameters or rope_theta + rope_scaling, dtype or
// torch_dtype. Of generation_config.json, which says how the model wants to be run, only the tokens
// that end a text are read: nothing else there changes what a token means. What each rank then
// holds of a tensor its layer declares (nn/declaration.h). No torch here, nothing about dtypes of
// the computation. Next: description.h, model_axes.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/gemma4/gemma4_spec.h"
#include "models/spec_parts.h"
#include "nn/rope_options.h"
#include "tessera/dtype.h"

namespace tessera::models {

enum class Family : std::uint8_t {
#define TESSERA_FAMILY(enumerator, folder, build) enumerator,
#include "models/families.def"
};

/// The fields carry the names of the file's keys.
struct ModelSpec {
  Family family = Family::kQwen3;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool attention_bias = false;  ///< on q, k, v and, in most families, o
  bool mlp_bias = false;        ///< on gate, up and down (llama)
  /// A norm of queries and keys, where the file says it; none = as the family has it.
  std::optional<bool> use_qk_norm = std::nullopt;
  /// Nothing here drops anything: kept for readers of the folder that is written.
  double attention_dropout = 0.0;
  nn::RopeOptions rope = {};
  /// One a layer; empty = all full (and of Gemma 4). The parts of Nemotron-H's layers are said here
  /// alone.
  std::vector<LayerType> layer_types = {};
  std::int64_t sliding_window = 0;  ///< of sliding layers
  /// Their numbers, ascending, where that is no matter of layer_types (SmolLM3).
  std::vector<std::int64_t> layers_without_rope = {};
  std::optional<DType> dtype = {};  ///< storage dtype that the file names, if any
  /// This token's embedding row gets no gradient from the embedding (only from a tied head).
  std::optional<std::int64_t> pad_token_id = {};
  std::optional<std::int64_t> bos_token_id = {};
  std::vector<std::int64_t> eos_token_ids = {};
  std::string tessera_tokenizer = {};     ///< "bytes" for a model trained on raw bytes, else empty
  std::optional<Gemma4Spec> gemma4 = {};  ///< of Gemma 4, and of no other family
  std::optional<MoeSpec> moe = {};        ///< of a family whose layers have experts
  std::optional<ChunkedSpec> chunked = {};     ///< of attention in chunks
  std::optional<MlaSpec> mla = {};             ///< of latent attention; head_dim is what rope turns
  std::optional<DeltaNetSpec> delta_net = {};  ///< of linear attention
  std::optional<MambaSpec> mamba = {};         ///< of state-space layers
  /// The rope of sliding layers, where it differs from that of full ones (`rope`).
  std::optional<nn::RopeOptions> sliding_rope = {};
  /// Scores are divided by its root; none = head_dim.
  std::optional<double> query_pre_attn_scalar = {};
  std::optional<Gpt2Spec> gpt2 = {};        ///< of GPT-2, and of no other family
  std::optional<GraniteSpec> granite = {};  ///< of Granite, and of no other family

  /// Whether a layer is attention, a state or a feed-forward, and has no other part (Nemotron-H).
  bool has_one_part() const { return mamba.has_value(); }
  LayerType type_of(std::int64_t layer) const {
    return layer_types.empty() ? LayerType::kFull : layer_types.at(static_cast<std::size_t>(layer));
  }
  bool is_moe(std::int64_t layer) const {
    if (has_one_part()) return type_of(layer) == LayerType::kExperts;
    return moe && moe->is_moe(layer);
  }
  bool is_sliding(std::int64_t layer) const { return type_of(layer) == LayerType::kSliding; }
  bool is_chunked(std::int64_t layer) const { return type_of(layer) == LayerType::kChunked; }
  bool is_linear(std::int64_t layer) const { return type_of(layer) == LayerType::kLinear; }
  /// Whether the layer is a feed-forward alone.
  bool sees_nothing(std::int64_t layer) const {
    const LayerType type = type_of(layer);
    return type == LayerType::kMlp || type == LayerType::kExperts;
  }
  bool has_rope(std::int64_t layer) const {
    return !std::ranges::binary_search(layers_without_rope, layer);
  }
  /// The first elements of a head that rope turns, where it is not the whole one.
  std::int64_t turned_dim() const {
    return static_cast<std::int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
  }
  std::int64_t q_size() const { return num_attention_heads * head_dim; }
  std::int64_t kv_size() const { return num_key_value_heads * head_dim; }
  /// Multiplications of a query with a key and of their weight with a value.
  std::int64_t attended_dims() const {
    return mla ? mla->qk_head_dim() + mla->v_head_dim : 2 * head_dim;
  }
  bool operator==(const ModelSpec&) const = default;
};

/// Where a model routes tokens to experts; no layers = nowhere.
struct RoutedExperts {
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  std::vector<std::int64_t> layers = {};  ///< their numbers, ascending
};
RoutedExperts routed_experts(const ModelSpec& spec);

/// The sizes of one layer's attention.
struct LayerAttention {
  std::int64_t dims = 0;  ///< of a query with a key, and of their weight with a value
  std::optional<std::int64_t> window = {};  ///< how many positions it sees; none = all before
};
LayerAttention attention_of(const ModelSpec& spec, std::int64_t layer);

/// The numbers of key and value heads that occur among the layers.
std::vector<std::int64_t> key_value_heads(const ModelSpec& spec);

/// None where the model sees no images.
std::optional<ImageTokens> image_tokens(const ModelSpec& spec);

enum class UnknownKeys : std::uint8_t { kRefuse, kWarn };
enum class Purpose : std::uint8_t { kTraining, kInference };

struct SpecOptions {
  UnknownKeys unknown_keys = UnknownKeys::kRefuse;  ///< model.allow_unknown_config_keys = kWarn
  /// In training dropout is refused, or of some families (FamilyTraits::not_dropped) left out.
  Purpose purpose = Purpose::kTraining;
};

struct ParsedSpec {
  ModelSpec spec;
  /// Layers after the model's own that predict further tokens (DeepSeek V3, GLM 4.5): published
  /// folders have them next to the model, which they do not change.
  std::int64_t prediction_layers = 0;
  /// The names of keys that are known to change nothing, other than those that every config has.
  std::vector<std::string> ignored_keys;
  /// One line an unknown key, with kWarn only; one for dropout that training leaves out.
  std::vector<std::string> warnings;
};

/// Reads the text of a config.json.
/// Errors: kFormat for malformed JSON (not an object, duplicate keys, too deep, over 4 MiB);
/// kConfig for a key or value that is missing, out of range, unknown or not supported, with both
/// named.
ParsedSpec parse_spec(std::string_view json_text, const SpecOptions& options = {});

/// The number of the prediction layer that a tensor of a published folder is named for, if any.
std::optional<std::int64_t> prediction_layer(const ParsedSpec& parsed, std::string_view published);

/// The config.json of a model in the hub's spelling, one that transformers loads;
/// parse_spec(config_json(spec)).spec == spec.
std::string config_json(const ModelSpec& spec);

/// `eos_token_id` in the text of a generation_config.json, a number or a list; empty where it names
/// none. Errors: kFormat for malformed JSON or another value.
std::vector<std::int64_t> generation_end_tokens(std::string_view text, std::string_view where);

/// Checks that a row has no more positions than the model has learned; most models have any number.
/// Errors: kConfig.
void check_learned_positions(const ModelSpec& spec, std::int64_t positions);

/// Checks degrees against the model's sizes; what degrees allow of each other is checked in
/// train/config/config_resolve.h. Errors: kConfig naming the key of [parallelism], what was found
/// and what would divide.
void check_degrees(const ModelSpec& spec, const ParallelDims& degrees);

}  // namespace tessera::models
