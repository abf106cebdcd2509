#include "models/spec_keys.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "models/keys/known_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr NumberRange kFactor{1.0, 1e9};
constexpr NumberRange kFrequencyFactor{1e-6, 1e9};
constexpr NumberRange kScaleRange{0.0, 1e3};

nn::RopeType rope_type(ConfigReader& keys, const std::string& path, const RopeAround& around) {
  const auto type = keys.word("type");
  const auto name = keys.word("rope_type");
  if (type && name && *type != *name)
    keys.refuse("type", concat("the same as ", path, "rope_type"));
  const std::string word = name ? *name : type.value_or("default");
  if (word == "default") return nn::RopeType::kDefault;
  if (around.long_rope_of_head) {
    if (word == "longrope" || word == "su" || word == "yarn") return nn::RopeType::kLongRope;
    keys.refuse(name ? "rope_type" : "type", "\"default\" or \"longrope\"");
  }
  if (word == "llama3") return nn::RopeType::kLlama3;
  if (word == "yarn") return nn::RopeType::kYarn;
  if (word == "linear") return nn::RopeType::kLinear;
  keys.refuse(name ? "rope_type" : "type", "\"default\", \"linear\", \"llama3\" or \"yarn\"");
}

double needed(ConfigReader& keys, std::string_view key, NumberRange range, std::string_view type) {
  const auto value = keys.number(key, range);
  if (!value) keys.refuse(key, concat("a number, as rope type ", type, " needs it"));
  return *value;
}

std::int64_t original_length(ConfigReader& keys, const RopeAround& around) {
  return keys.integer("original_max_position_embeddings", kSize)
      .value_or(around.original_max_position_embeddings.value_or(around.max_position_embeddings));
}

void read_llama3(ConfigReader& keys, const RopeAround& around, nn::RopeOptions& rope) {
  rope.factor = needed(keys, "factor", kFactor, "llama3");
  rope.low_freq_factor = needed(keys, "low_freq_factor", kFrequencyFactor, "llama3");
  rope.high_freq_factor = needed(keys, "high_freq_factor", kFrequencyFactor, "llama3");
  rope.original_max_position_embeddings = original_length(keys, around);
  // Llama 4's are equal: then nothing lies between.
  if (rope.high_freq_factor < rope.low_freq_factor) {
    keys.refuse("high_freq_factor", "a number of at least low_freq_factor");
  }
}

/// As transformers: a factor that is null is how far the positions go beyond the original ones.
double yarn_factor(ConfigReader& keys, const RopeAround& around, std::int64_t original) {
  if (!keys.is_null("factor")) return needed(keys, "factor", kFactor, "yarn");
  const double factor =
      static_cast<double>(around.max_position_embeddings) / static_cast<double>(original);
  if (factor < kFactor.min) {
    keys.refuse("factor",
                concat("a number, as max_position_embeddings = ", around.max_position_embeddings,
                       " is less than original_max_position_embeddings = ", original));
  }
  return factor;
}

void read_yarn(ConfigReader& keys, const RopeAround& around, nn::RopeOptions& rope) {
  rope.original_max_position_embeddings = original_length(keys, around);
  rope.factor = yarn_factor(keys, around, rope.original_max_position_embeddings);
  nn::YarnOptions& yarn = rope.yarn;
  yarn.beta_fast = keys.number("beta_fast", kFrequencyFactor).value_or(yarn.beta_fast);
  yarn.beta_slow = keys.number("beta_slow", kFrequencyFactor).value_or(yarn.beta_slow);
  if (yarn.beta_fast < yarn.beta_slow) {
    keys.refuse("beta_fast", concat("a number of at least beta_slow = ", yarn.beta_slow));
  }
  if (rope.theta <= 1.0) keys.refuse("rope_theta", "a number above 1, as yarn takes its logarithm");
  yarn.mscale = keys.number("mscale", kScaleRange);
  yarn.mscale_all_dim = keys.number("mscale_all_dim", kScaleRange);
  yarn.attention_factor = keys.number("attention_factor", kScaleRange);
  if (yarn.attention_factor == 0.0) keys.refuse("attention_factor", "a number above 0");
  yarn.truncate = keys.boolean("truncate").value_or(yarn.truncate);
}

std::vector<double> pair_factors(ConfigReader& keys, std::string_view key, std::int64_t pairs) {
  const nlohmann::json* list = keys.take(key);
  const bool are_factors =
      list != nullptr && list->is_array() && std::cmp_equal(list->size(), pairs) &&
      std::ranges::all_of(*list, [](const nlohmann::json& each) {
        return each.is_number() && each.get<double>() >= kFrequencyFactor.min &&
               each.get<double>() <= kFrequencyFactor.max;
      });
  if (!are_factors) {
    keys.refuse(key, concat("a list of ", pairs, " numbers from ", kFrequencyFactor.min, " to ",
                            kFrequencyFactor.max, ", one of each pair that turns"));
  }
  return list->get<std::vector<double>>();
}

/// As transformers: without a factor it is how far the positions go beyond the original ones.
void read_long_rope(ConfigReader& keys, const RopeAround& around, nn::RopeOptions& rope) {
  rope.original_max_position_embeddings = original_length(keys, around);
  if (rope.original_max_position_embeddings < 2) {
    keys.refuse("original_max_position_embeddings", "at least 2, as longrope takes its logarithm");
  }
  rope.factor = keys.number("factor", kFactor)
                    .value_or(static_cast<double>(around.max_position_embeddings) /
                              static_cast<double>(rope.original_max_position_embeddings));
  const auto turned = static_cast<std::int64_t>(static_cast<double>(*around.long_rope_of_head) *
                                                rope.partial_rotary_factor);
  rope.long_rope = nn::LongRopeOptions{pair_factors(keys, "short_factor", turned / 2),
                                       pair_factors(keys, "long_factor", turned / 2),
                                       keys.number("attention_factor", kScaleRange)};
  if (rope.long_rope->attention_factor == 0.0) keys.refuse("attention_factor", "a number above 0");
}

const char* name_of(nn::RopeType type) {
  switch (type) {
    case nn::RopeType::kDefault:
      return "default";
    case nn::RopeType::kLlama3:
      return "llama3";
    case nn::RopeType::kProportional:
      return "proportional";
    case nn::RopeType::kYarn:
      return "yarn";
    case nn::RopeType::kLinear:
      return "linear";
    case nn::RopeType::kLongRope:
      return "longrope";
  }
  TESSERA_INVARIANT(false, "a kind of rope without a name");
}

/// The values that determine a rope, by the names of their keys.
std::vector<std::pair<const char*, nlohmann::json>> meant_by(const nn::RopeOptions& rope) {
  std::vector<std::pair<const char*, nlohmann::json>> values{
      {"rope_theta", rope.theta},
      {"factor", rope.factor},
      {"partial_rotary_factor", rope.partial_rotary_factor}};
  if (rope.type == nn::RopeType::kLlama3) {
    values.emplace_back("low_freq_factor", rope.low_freq_factor);
    values.emplace_back("high_freq_factor", rope.high_freq_factor);
  }
  if (rope.type == nn::RopeType::kYarn) {
    values.emplace_back("beta_fast", rope.yarn.beta_fast);
    values.emplace_back("beta_slow", rope.yarn.beta_slow);
    values.emplace_back("truncate", rope.yarn.truncate);
    values.emplace_back("attention_factor", table_factor(rope));  // what mscale gives without it
    values.emplace_back("mscale_all_dim", softmax_factor(rope));
  }
  if (rope.type == nn::RopeType::kLongRope) {
    values.emplace_back("short_factor", rope.long_rope->short_factor);
    values.emplace_back("long_factor", rope.long_rope->long_factor);
    values.emplace_back("attention_factor", table_factor(rope));
  }
  values.emplace_back("original_max_position_embeddings", rope.original_max_position_embeddings);
  return values;
}

/// Whether frequencies and attention stay as without a record.
bool scales_nothing(const nn::RopeOptions& rope) {
  return rope.factor == 1.0 && table_factor(rope) == 1.0 && softmax_factor(rope) == 1.0;
}

struct Difference {
  std::string key;  ///< empty where both compute the same
  std::string one, other;
};

/// The first difference of two ropes.
Difference difference(const nn::RopeOptions& one, const nn::RopeOptions& other) {
  nn::RopeOptions same = one;
  if (scales_nothing(one) && scales_nothing(other)) {
    same = other;
    same.theta = one.theta;
    same.partial_rotary_factor = one.partial_rotary_factor;
  }
  if (same.type != other.type) return {"rope_type", name_of(one.type), name_of(other.type)};
  const auto ones = meant_by(same), others = meant_by(other);
  for (std::size_t i = 0; i < ones.size(); ++i) {
    if (ones[i].second != others[i].second) {
      return {ones[i].first, shown(ones[i].second), shown(others[i].second)};
    }
  }
  return {};
}

// Tables of the files' tensors are built from this number.
constexpr IntRange kExperts{1, 4096};

}  // namespace

std::int64_t required(ConfigReader& keys, std::string_view key, IntRange range) {
  const auto value = keys.integer(key, range);
  if (!value) keys.refuse(key, concat("an integer from ", range.min, " to ", range.max));
  return *value;
}

std::optional<DType> read_dtype(ConfigReader& keys) {
  std::optional<DType> result;
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    auto word = keys.word(key);
    if (!word) continue;
    if (word->starts_with("torch.")) word->erase(0, 6);
    const auto dtype = parse_dtype(*word);
    if (!dtype || !is_floating(*dtype)) keys.refuse(key, "float32, bfloat16, float16 or float64");
    if (result && *result != *dtype) keys.refuse(key, "the same as dtype");
    result = dtype;
  }
  return result;
}

void check_turned_part(ConfigReader& keys, const ModelSpec& spec) {
  const std::int64_t turned = spec.turned_dim();
  if (turned == 0 || turned % 2 != 0) {
    keys.refuse("partial_rotary_factor",
                concat("a part of head_dim = ", spec.head_dim, " that turns in pairs"));
  }
}

KeyRow turned_part_row() {
  return written({"partial_rotary_factor"},
                 [](const ModelSpec& spec) { return spec.rope.partial_rotary_factor; });
}

void read_activation(ConfigReader& keys, ModelSpec& /*spec*/) {
  // transformers has no activation of that name either; an absent key is its default.
  if (keys.is_null("hidden_act")) {
    keys.refuse("hidden_act", "\"silu\" (the activation of the MLP)");
  }
  keys.expect("hidden_act", "silu", "the activation of the MLP");
}

void read_tokens(ConfigReader& keys, ModelSpec& spec) {
  if (keys.contains("pad_token_id")) {
    // A negative padding index counts from the end, as torch's embedding reads it.
    spec.pad_token_id = keys.integer("pad_token_id", {-spec.vocab_size, spec.vocab_size - 1});
    if (spec.pad_token_id < 0) *spec.pad_token_id += spec.vocab_size;
  } else if (spec.pad_token_id >= spec.vocab_size) {
    spec.pad_token_id.reset();
  }
  constexpr IntRange kTokenId{-1, std::int64_t{1} << 31};
  if (keys.contains("bos_token_id")) spec.bos_token_id = keys.integer("bos_token_id", kTokenId);
  if (keys.contains("eos_token_id")) spec.eos_token_ids = keys.integers("eos_token_id", kTokenId);
}

double read_attention_dropout(ConfigReader& keys, Purpose purpose) {
  if (purpose == Purpose::kTraining) {
    keys.expect("attention_dropout", 0.0, "dropout is not supported in training");
  }
  return keys.number("attention_dropout", {0.0, 1.0}).value_or(0.0);
}

std::string read_tokenizer(ConfigReader& keys) {
  const std::string name = keys.word("tessera_tokenizer").value_or("");
  if (!name.empty() && name != "bytes") keys.refuse("tessera_tokenizer", "\"bytes\"");
  return name;
}

void check_total(double elements) {
  constexpr double kMost = 1e18;
  TESSERA_CHECK(elements <= kMost, ErrorKind::kConfig, "config.json: found sizes of about ",
                elements, " parameters, expected at most ", kMost);
}

nn::RopeOptions read_rope_record(const nlohmann::json& record, const std::string& path,
                                 const RopeAround& around, LeftKeys& left) {
  ConfigReader keys(record, path);
  nn::RopeOptions rope;
  rope.type = rope_type(keys, path, around);
  rope.theta = keys.number("rope_theta", kTheta).value_or(around.theta);
  if (around.partial_rotary_factor) {
    if (keys.is_null("partial_rotary_factor")) {
      keys.refuse("partial_rotary_factor", "a number from 0 to 1, or no such key");
    }
    rope.partial_rotary_factor =
        keys.number("partial_rotary_factor", {0.0, 1.0}).value_or(*around.partial_rotary_factor);
  } else {
    keys.expect("partial_rotary_factor", 1.0, kFullRotary);
  }
  if (rope.type == nn::RopeType::kLlama3) read_llama3(keys, around, rope);
  if (rope.type == nn::RopeType::kYarn) read_yarn(keys, around, rope);
  if (rope.type == nn::RopeType::kLinear) rope.factor = needed(keys, "factor", kFactor, "linear");
  if (rope.type == nn::RopeType::kLongRope) read_long_rope(keys, around, rope);
  settle_left_rope_keys(keys, left);
  return rope;
}

void check_same_rope(ConfigReader& keys, const nn::RopeOptions& old, const nn::RopeOptions& rope,
                     const nlohmann::json& record, std::string_view path) {
  const auto [key, one, other] = difference(old, rope);
  if (key.empty()) return;
  const nlohmann::json& scaling = *keys.find("rope_scaling");
  const auto said = [&](const std::string& value, const nlohmann::json& in,
                        std::string_view where) {
    const bool is_there = key == "rope_type" || in.contains(key) || keys.contains(key);
    return is_there ? value : concat(value, " (meant without the key, which ", where, " lacks)");
  };
  keys.refuse("rope_scaling", concat("the rope of ", path, ", or one of the two: they differ in ",
                                     key, ": ", said(one, scaling, "rope_scaling"), ", but ",
                                     said(other, record, path), " there"));
}

void check_repeated(ConfigReader& keys, std::string_view key, const nlohmann::json& record,
                    const std::string& path, std::string_view key_in_record) {
  const nlohmann::json* found = keys.find(key);
  const auto inside = record.find(key_in_record);
  if (found == nullptr || found->is_null() || inside == record.end() || inside->is_null()) return;
  if (*found == *inside) return;
  keys.refuse(
      key, concat("the ", shown(*inside), " of ", path, ".", key_in_record, ", or one of the two"));
}

namespace {

/// Values outside of the records, which replace those of the family.
RopeAround outside_records(ConfigReader& keys, RopeAround around) {
  around.theta = keys.number("rope_theta", kTheta).value_or(around.theta);
  const auto original = keys.integer("original_max_position_embeddings", kSize);
  if (original) around.original_max_position_embeddings = original;
  if (around.partial_rotary_factor) {
    // transformers puts its default in place of an absent key alone; null: rotary_dim is head_dim.
    const bool is_null = keys.is_null("partial_rotary_factor");
    const auto part = keys.number("partial_rotary_factor", {0.0, 1.0});
    if (part || is_null) around.partial_rotary_factor = part.value_or(1.0);
  }
  return around;
}

}  // namespace

nn::RopeOptions read_rope(ConfigReader& keys, const RopeAround& family, LeftKeys& left) {
  const RopeAround around = outside_records(keys, family);
  const auto read = [&](const std::string& name) {
    const nlohmann::json* record = keys.take(name);
    std::optional<nn::RopeOptions> rope;
    if (record == nullptr || says_nothing(*record)) return rope;
    if (!record->is_object()) keys.refuse(name, "an object or null");
    rope = read_rope_record(*record, name + ".", around, left);
    for (const char* key :
         {"rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}) {
      check_repeated(keys, key, *record, name, key);
    }
    return rope;
  };
  const auto rope = read("rope_parameters"), old = read("rope_scaling");
  if (rope && old) {
    check_same_rope(keys, *old, *rope, *keys.find("rope_parameters"), "rope_parameters");
  }
  nn::RopeOptions plain{.theta = around.theta};
  plain.partial_rotary_factor = around.partial_rotary_factor.value_or(1.0);
  return rope ? *rope : old.value_or(plain);
}

Json rope_scaling_json(const nn::RopeOptions& rope, std::string_view type_key) {
  const std::string key(type_key);
  if (rope.type == nn::RopeType::kDefault) return nullptr;
  if (rope.type == nn::RopeType::kLinear) return {{"factor", rope.factor}, {key, "linear"}};
  if (rope.type == nn::RopeType::kLlama3) {
    return {{"factor", rope.factor},
            {"high_freq_factor", rope.high_freq_factor},
            {"low_freq_factor", rope.low_freq_factor},
            {"original_max_position_embeddings", rope.original_max_position_embeddings},
            {key, "llama3"}};
  }
  Json json;
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) json[name] = *value;
  };
  if (rope.type == nn::RopeType::kLongRope) {
    add("attention_factor", rope.long_rope->attention_factor);
    json["long_factor"] = rope.long_rope->long_factor;
    json["short_factor"] = rope.long_rope->short_factor;
    json[key] = "longrope";
    return json;
  }
  TESSERA_INVARIANT(rope.type == nn::RopeType::kYarn,
                    "a kind of rope that this record does not have");
  add("attention_factor", rope.yarn.attention_factor);
  json["beta_fast"] = rope.yarn.beta_fast;
  json["beta_slow"] = rope.yarn.beta_slow;
  json["factor"] = rope.factor;
  add("mscale", rope.yarn.mscale);
  add("mscale_all_dim", rope.yarn.mscale_all_dim);
  json["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (!rope.yarn.truncate) json["truncate"] = false;
  json[key] = "yarn";
  return json;
}

void read_expert_counts(ConfigReader& keys, ModelSpec& spec) {
  MoeSpec& moe = *spec.moe;
  const auto local = keys.integer("num_local_experts", kExperts);
  const auto published = keys.integer("num_experts", kExperts);
  if (local && published && *local != *published) {
    keys.refuse("num_experts", concat("the same as num_local_experts = ", *local));
  }
  if (!local && !published) {
    keys.refuse("num_experts", concat("an integer from 1 to ", kExperts.max));
  }
  moe.num_experts = published ? *published : *local;
  moe.experts_per_token = required(keys, "num_experts_per_tok", {1, moe.num_experts});
}

KeyRow written(KeyRow row, std::function<Json(const ModelSpec&)> value) {
  row.write = [key = std::string(row.key), value = std::move(value)](const ModelSpec& spec,
                                                                     Json& json) {
    Json of_spec = value(spec);
    if (!of_spec.is_discarded()) json[key] = std::move(of_spec);
  };
  return row;
}

KeyRow only(std::string_view key, const nlohmann::json& value, std::string_view why) {
  return {key, [=](ConfigReader& keys, ModelSpec&) { keys.expect(key, value, why); }};
}

KeyRow always(std::string_view key, const nlohmann::json& value, std::string_view why) {
  return written(only(key, value, why), [value](const ModelSpec&) { return Json(value); });
}

KeyRow said(std::string_view key, const nlohmann::json& value) {
  return written({key, [key](ConfigReader& keys, ModelSpec&) { keys.ignore({key}); }},
                 [value](const ModelSpec&) { return Json(value); });
}

KeyRow ignored(std::initializer_list<std::string_view> names) {
  return {"", [names = std::vector(names)](ConfigReader& keys, ModelSpec&) {
            for (const std::string_view name : names) keys.ignore({name});
          }};
}

KeyRow window_row() {
  return written(row("sliding_window", &ModelSpec::sliding_window, kSize, Null::kNone),
                 [](const ModelSpec& spec) {
                   return spec.sliding_window == 0 ? Json() : Json(spec.sliding_window);
                 });
}

KeyRow eos_row() {
  return written({"eos_token_id"}, [](const ModelSpec& spec) -> Json {
    const auto& ids = spec.eos_token_ids;
    if (ids.empty()) return nullptr;
    return ids.size() == 1 ? Json(ids.front()) : Json(ids);
  });
}

KeyRow pad_row() {
  return written({"pad_token_id"}, [](const ModelSpec& spec) {
    return spec.pad_token_id ? Json(*spec.pad_token_id) : left_out();
  });
}

KeyRow dtype_row(std::string_view key) {
  return written({key}, [](const ModelSpec& spec) {
    return spec.dtype ? Json(to_string(*spec.dtype)) : left_out();
  });
}

KeyRows joined(std::initializer_list<KeyRows> lists) {
  KeyRows rows;
  for (const KeyRows& list : lists) {
    for (const KeyRow& row : list) {
      const auto same = std::ranges::find(rows, row.key, &KeyRow::key);
      if (same == rows.end() || row.key.empty()) {
        rows.push_back(row);
      } else {
        *same = row;
      }
    }
  }
  return rows;
}

KeyRows decoder_rows(KeyRows own) {
  const KeyRows rows{
      written(
          {"architectures"},
          [](const ModelSpec& spec) { return Json::array({traits(spec.family).architecture}); }),
      row("attention_bias", &ModelSpec::attention_bias, {}, Null::kNone),
      written("attention_dropout", &ModelSpec::attention_dropout),
      written("bos_token_id", &ModelSpec::bos_token_id),
      eos_row(),
      row("head_dim", &ModelSpec::head_dim),
      written({"hidden_act", read_activation}, [](const ModelSpec&) { return "silu"; }),
      size("hidden_size", &ModelSpec::hidden_size),
      row("initializer_range", &ModelSpec::initializer_range, {0.0, 1e3}),
      size("intermediate_size", &ModelSpec::intermediate_size),
      row("max_position_embeddings", &ModelSpec::max_position_embeddings),
      only("mlp_bias", false, "this family has none"),
      written({"model_type"}, [](const ModelSpec& spec) { return traits(spec.family).model_type; }),
      size("num_attention_heads", &ModelSpec::num_attention_heads),
      size("num_hidden_layers", &ModelSpec::num_hidden_layers, kLayers),
      row("num_key_value_heads", &ModelSpec::num_key_value_heads, kSize, Null::kNone),
      pad_row(),
      row("rms_norm_eps", &ModelSpec::rms_norm_eps, kEps),
      written({"rope_scaling"},
              [](const ModelSpec& spec) { return rope_scaling_json(spec.rope, "rope_type"); }),
      written({"rope_theta"}, [](const ModelSpec& spec) { return spec.rope.theta; }),
      row("tie_word_embeddings", &ModelSpec::tie_word_embeddings, {}, Null::kNone),
      dtype_row("torch_dtype"),
      said("use_cache", true),
      size("vocab_size", &ModelSpec::vocab_size),
  };
  return joined({rows, std::move(own)});
}

void read_rows(const KeyRows& rows, ConfigReader& keys, ModelSpec& spec) {
  for (const KeyRow& row : rows) {
    if (row.read) row.read(keys, spec);
  }
}

Json written_by(const KeyRows& rows, const ModelSpec& spec) {
  Json json;
  for (const KeyRow& row : rows) {
    if (row.write) row.write(spec, json);
  }
  return json;
}

}  // namespace tessera::models
