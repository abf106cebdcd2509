// What the readers and writers of all families do with the keys of a config.json: those that every
// family has, those of rotary embeddings in both spellings, and those about mixtures of experts
// that several families share.
//
// Private to model_spec.cpp and the families' own readers. Next: model_spec.cpp,
// gemma4/gemma4.cpp, qwen3_moe/qwen3_moe.cpp, gpt_oss/gpt_oss.cpp.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/config_reader.h"
#include "models/model_spec.h"
#include "nn/rope_options.h"

namespace tessera::models {

struct LeftKeys;

// Layers are bounded lower than other sizes: tables of parameters are built from this number.
inline constexpr IntRange kLayers{1, 65536};
inline constexpr IntRange kSize{1, std::int64_t{1} << 31};
inline constexpr NumberRange kTheta{1.0, 1e15};

/// Errors: kConfig if absent.
std::int64_t required(ConfigReader& keys, std::string_view key, IntRange range);

/// Of `dtype` and `torch_dtype`, which must agree.
std::optional<DType> read_dtype(ConfigReader& keys);

/// Into spec.layer_types, which holds what an absent key means. Errors: kConfig.
void read_layer_types(ConfigReader& keys, ModelSpec& spec);
nlohmann::ordered_json layer_types_json(const std::vector<LayerType>& types);

/// Padding, begin and end; vocab_size is set.
void read_tokens(ConfigReader& keys, ModelSpec& spec);

/// attention_dropout, which is refused above 0 in training.
double read_attention_dropout(ConfigReader& keys, Purpose purpose);

/// Our own key: "bytes", or empty where it is absent.
std::string read_tokenizer(ConfigReader& keys);

/// Written as the hub does: null, one id, or a list of them.
nlohmann::ordered_json eos_token(const std::vector<std::int64_t>& ids);

template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

/// Errors: kConfig for more elements of all parameters than byte counts can hold.
void check_total(double elements);

inline constexpr std::string_view kWholeHeadTurns = "rope turns the whole head";
/// transformers takes an empty record for none.
inline bool says_nothing(const nlohmann::json& record) {
  return record.is_object() && record.empty();
}

/// The values that apply where a record of rope does not give them.
struct RopeAround {
  double theta = 0.0;
  /// Stands for original_max_position_embeddings where that is nowhere, as in transformers.
  std::int64_t max_position_embeddings = 0;
  /// Beside the records.
  std::optional<std::int64_t> original_max_position_embeddings = std::nullopt;
  /// The rotary share of a head; none where the family always has the whole head.
  std::optional<double> partial_rotary_factor = std::nullopt;
};

/// Reads rope_parameters, or rope_scaling with rope_theta, or both where they agree. A record names
/// its kind as rope_type or as type. Keys of a record that its kind does not read go to `left`. Errors:
/// kConfig for a kind or a value that is not supported, and for two that differ.
nn::RopeOptions read_rope(ConfigReader& keys, const RopeAround& family, LeftKeys& left);

/// Reads one record that describes rope: rope_parameters (with theta), rope_scaling (without), or
/// that of a type of layers. `path` precedes keys in messages.
nn::RopeOptions read_rope_record(const nlohmann::json& record, const std::string& path,
                                 const RopeAround& around, LeftKeys& left);

/// Checks that `old`, from rope_scaling, computes what `rope` does, from the `record` of `keys` at
/// `path`. Errors: kConfig with both.
void check_same_rope(ConfigReader& keys, const nn::RopeOptions& old, const nn::RopeOptions& rope,
                     const nlohmann::json& record, std::string_view path);
/// Checks that a value of the old spelling equals that of the record at `path`, where both give it.
/// Errors: kConfig with both.
void check_beside(ConfigReader& keys, std::string_view key, const nlohmann::json& record,
                  const std::string& path, std::string_view key_in_record);

/// The record rope_scaling as the hub's configs have it, null for plain rope; `type_key` is the
/// family's name of the key: rope_type or type.
nlohmann::ordered_json rope_scaling_json(const nn::RopeOptions& rope, std::string_view type_key);

/// num_experts or num_local_experts, and num_experts_per_tok. Errors: kConfig for both with
/// different values, for neither, for more chosen than there are.
void read_expert_counts(ConfigReader& keys, MoeSpec& moe);

/// router_aux_loss_coef and output_router_logits.
void read_aux_loss(ConfigReader& keys, MoeSpec& moe);
void write_aux_loss(const MoeSpec& moe, nlohmann::ordered_json& json);

}  // namespace tessera::models
