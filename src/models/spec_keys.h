// The keys of a config.json: rows that read and write a member of the spec, the rows that all
// decoders have, and readers of what no row can express, such as rotary embeddings in both
// spellings.
//
// Private to model_spec.cpp and the families' own readers. Next: qwen3_moe/qwen3_moe.cpp,
// gemma4/gemma4.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "models/family.h"
#include "models/keys/config_reader.h"
#include "models/model_spec.h"
#include "nn/rope_options.h"

namespace tessera::models {

using Json = nlohmann::ordered_json;

// Layers are bounded lower than other sizes: tables of parameters are built from this number.
inline constexpr IntRange kLayers{1, 65536};
inline constexpr IntRange kSize{1, std::int64_t{1} << 31};
inline constexpr NumberRange kTheta{1.0, 1e15};
inline constexpr NumberRange kEps{1e-30, 1.0};
inline constexpr NumberRange kAuxLoss{0.0, 1e6};

/// Errors: kConfig if absent.
std::int64_t required(ConfigReader& keys, std::string_view key, IntRange range);

// -------------------------------------------------------------------------------------------- rows

/// How null is read. An absent key leaves the spec's value.
enum class Null : std::uint8_t {
  kAbsent,  ///< as an absent key
  kNone,    ///< as no value, 0 or false
};

namespace detail {

/// The record of the spec that a member is of; null where it has none.
template <class Part, class Spec>
auto part_of(Spec& spec) {
  [[maybe_unused]] const auto in = [](auto& part) { return part ? &*part : nullptr; };
  if constexpr (std::is_same_v<Part, ModelSpec>) return &spec;
  if constexpr (std::is_same_v<Part, MoeSpec>) return in(spec.moe);
  if constexpr (std::is_same_v<Part, MlaSpec>) return in(spec.mla);
  if constexpr (std::is_same_v<Part, DeltaNetSpec>) return in(spec.delta_net);
  if constexpr (std::is_same_v<Part, MambaSpec>) return in(spec.mamba);
  if constexpr (std::is_same_v<Part, ChunkedSpec>) return in(spec.chunked);
  if constexpr (std::is_same_v<Part, Gpt2Spec>) return in(spec.gpt2);
  if constexpr (std::is_same_v<Part, GraniteSpec>) return in(spec.granite);
  if constexpr (std::is_same_v<Part, Gemma4Spec>) return in(spec.gemma4);
  if constexpr (std::is_same_v<Part, Gemma4Vision>) return in(spec.gemma4->vision);
}

template <class T>
T plain(const T&);
template <class T>
T plain(const std::optional<T>&);
template <class M>
using Plain = decltype(plain(std::declval<M>()));
template <class M>
using RangeOf = std::conditional_t<std::is_same_v<Plain<M>, std::int64_t>, IntRange, NumberRange>;

template <class T>
Json json_of(const T& value) {
  if constexpr (std::is_same_v<T, Plain<T>>) {
    return value;
  } else {
    return value ? Json(*value) : Json();
  }
}

}  // namespace detail

/// A key that is written as `value` has it; left out where that is discarded.
KeyRow written(KeyRow row, std::function<Json(const ModelSpec&)> value);
inline Json left_out() { return Json::value_t::discarded; }
template <class Part, class M>
KeyRow written(std::string_view key, M Part::* member) {
  return written({key}, [member](const ModelSpec& spec) {
    const auto* part = detail::part_of<Part>(spec);
    return part == nullptr ? Json() : detail::json_of(part->*member);
  });
}

/// A key that is a member of the spec.
template <class Part, class M>
KeyRow row(std::string_view key, M Part::* member,
           const std::type_identity_t<detail::RangeOf<M>>& range = {},
           Null null = std::is_same_v<M, detail::Plain<M>> ? Null::kAbsent : Null::kNone) {
  KeyRow result = written(key, member);
  result.read = [=](ConfigReader& keys, ModelSpec& spec) {
    std::optional<detail::Plain<M>> found;
    if constexpr (std::is_same_v<detail::Plain<M>, bool>) found = keys.boolean(key);
    if constexpr (std::is_same_v<detail::Plain<M>, double>) found = keys.number(key, range);
    if constexpr (std::is_same_v<detail::Plain<M>, std::int64_t>) found = keys.integer(key, range);
    M& value = detail::part_of<Part>(spec)->*member;
    if (null == Null::kNone && keys.contains(key)) value = M{};
    if constexpr (std::is_same_v<M, detail::Plain<M>>) {
      value = found.value_or(value);
    } else if (found) {
      value = found;
    }
  };
  return result;
}
/// A key that is a size: null is refused, and absence where the spec has 0.
template <class Part>
KeyRow size(std::string_view key, std::int64_t Part::* member, const IntRange& range = kSize) {
  KeyRow result = written(key, member);
  result.read = [=](ConfigReader& keys, ModelSpec& spec) {
    std::int64_t& value = detail::part_of<Part>(spec)->*member;
    if (keys.contains(key) || value == 0) value = required(keys, key, range);
  };
  return result;
}

inline constexpr const char* kNoBiases = "projections of this family have no bias";
/// A key that may have one value alone; `why` says what another would mean.
KeyRow only(std::string_view key, const nlohmann::json& value, std::string_view why);
/// The same, and it is written.
KeyRow always(std::string_view key, const nlohmann::json& value, std::string_view why);
/// A key that changes nothing here, and is written.
KeyRow said(std::string_view key, const nlohmann::json& value);
/// Keys that change nothing here.
KeyRow ignored(std::initializer_list<std::string_view> keys);

/// sliding_window, which null takes away: 0.
KeyRow window_row();
// These are read by read_tokens() and read_dtype().
KeyRow eos_row();  ///< written as the hub does: null, one id, or a list of them
KeyRow pad_row();  ///< left out where there is none
KeyRow dtype_row(std::string_view key);

/// Appends the lists to each other; a row replaces an earlier one of the same key in its place.
KeyRows joined(std::initializer_list<KeyRows> lists);
/// The rows of every decoder (decoder.h), joined with `own`.
KeyRows decoder_rows(KeyRows own = {});

void read_rows(const KeyRows& rows, ConfigReader& keys, ModelSpec& spec);
Json written_by(const KeyRows& rows, const ModelSpec& spec);

// ----------------------------------------------------------------------------- what is no row

/// Reads `dtype` and `torch_dtype`, which must agree.
std::optional<DType> read_dtype(ConfigReader& keys);

/// Refuses a partial_rotary_factor that leaves no even number of elements to turn. Errors: kConfig.
void check_turned_part(ConfigReader& keys, const ModelSpec& spec);
/// partial_rotary_factor, which read_rope() reads.
KeyRow turned_part_row();

/// hidden_act of an MLP whose gate is SiLU.
void read_activation(ConfigReader& keys, ModelSpec& spec);

/// Reads padding, begin and end; vocab_size is set, and so are the meanings of absent keys.
void read_tokens(ConfigReader& keys, ModelSpec& spec);

/// attention_dropout, which is refused above 0 in training.
double read_attention_dropout(ConfigReader& keys, Purpose purpose);

/// Our own key: "bytes", or empty where it is absent.
std::string read_tokenizer(ConfigReader& keys);

/// Errors: kConfig for more elements of all parameters than byte counts can hold.
void check_total(double elements);

inline constexpr std::string_view kFullRotary = "rope turns every element of a head";
/// transformers takes an empty record for none.
inline bool says_nothing(const nlohmann::json& record) {
  return record.is_object() && record.empty();
}

/// The values that apply where a record of rope does not give them.
struct RopeAround {
  double theta = 0.0;
  /// Stands for original_max_position_embeddings where that is nowhere, as in transformers.
  std::int64_t max_position_embeddings = 0;
  /// original_max_position_embeddings outside of the records.
  std::optional<std::int64_t> original_max_position_embeddings = std::nullopt;
  /// The rotary share of a head; none where the family always has the whole head.
  std::optional<double> partial_rotary_factor = std::nullopt;
  /// The elements of a head in a family whose records are of kind "longrope" ("su" and "yarn" are
  /// older names of it) or default; none in other families.
  std::optional<std::int64_t> long_rope_of_head = std::nullopt;
};

/// Reads rope_parameters, or rope_scaling with rope_theta, or both where they agree. A record names
/// its kind as rope_type or as type. Keys of a record that its kind does not read go to `left`.
/// Errors: kConfig for a kind or a value that is not supported, and for two that differ.
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
void check_repeated(ConfigReader& keys, std::string_view key, const nlohmann::json& record,
                    const std::string& path, std::string_view key_in_record);

/// The record rope_scaling as the hub's configs have it, null for plain rope; `type_key` is the
/// family's name of the key: rope_type or type.
Json rope_scaling_json(const nn::RopeOptions& rope, std::string_view type_key);

/// num_experts or num_local_experts, and num_experts_per_tok. Errors: kConfig for both with
/// different values, for neither, for more chosen than there are.
void read_expert_counts(ConfigReader& keys, ModelSpec& spec);

}  // namespace tessera::models
