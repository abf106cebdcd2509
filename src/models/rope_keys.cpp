#include "models/rope_keys.h"

#include <utility>

#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr NumberRange kFactor{1.0, 1e9};
constexpr NumberRange kFrequencyFactor{1e-6, 1e9};
constexpr NumberRange kScaleRange{0.0, 1e3};

nn::RopeType rope_type(ConfigReader& keys, const std::string& path) {
  const auto type = keys.word("type");
  const auto name = keys.word("rope_type");
  if (type && name && *type != *name)
    keys.refuse("type", concat("the same as ", path, "rope_type"));
  const std::string word = name ? *name : type.value_or("default");
  if (word == "default") return nn::RopeType::kDefault;
  if (word == "llama3") return nn::RopeType::kLlama3;
  if (word == "yarn") return nn::RopeType::kYarn;
  keys.refuse(name ? "rope_type" : "type", "\"default\", \"llama3\" or \"yarn\"");
}

double needed(ConfigReader& keys, std::string_view key, NumberRange range, std::string_view type) {
  const auto value = keys.number(key, range);
  if (!value) keys.refuse(key, concat("a number, as rope type ", type, " needs it"));
  return *value;
}

void read_llama3(ConfigReader& keys, nn::RopeOptions& rope) {
  rope.factor = needed(keys, "factor", kFactor, "llama3");
  rope.low_freq_factor = needed(keys, "low_freq_factor", kFrequencyFactor, "llama3");
  rope.high_freq_factor = needed(keys, "high_freq_factor", kFrequencyFactor, "llama3");
  rope.original_max_position_embeddings = required(keys, "original_max_position_embeddings", kSize);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    keys.refuse("high_freq_factor", "a number above low_freq_factor");
  }
}

void read_yarn(ConfigReader& keys, nn::RopeOptions& rope) {
  rope.factor = needed(keys, "factor", kFactor, "yarn");
  rope.original_max_position_embeddings = required(keys, "original_max_position_embeddings", kSize);
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

/// One of the two records that describe rope: rope_parameters (with theta) or rope_scaling
/// (without).
void read_rope_record(const nlohmann::json& record, const std::string& path, nn::RopeOptions& rope,
                      std::vector<std::string>& unknown) {
  ConfigReader keys(record, path);
  rope.type = rope_type(keys, path);
  if (const auto theta = keys.number("rope_theta", kTheta)) rope.theta = *theta;
  keys.expect("partial_rotary_factor", 1.0, "rope turns the whole head");
  if (rope.type == nn::RopeType::kLlama3) read_llama3(keys, rope);
  if (rope.type == nn::RopeType::kYarn) read_yarn(keys, rope);
  for (std::string& line : keys.unknown()) unknown.push_back(std::move(line));
}

}  // namespace

nn::RopeOptions read_rope(ConfigReader& keys, double default_theta,
                          std::vector<std::string>& unknown) {
  nn::RopeOptions rope;
  rope.theta = default_theta;
  const auto theta = keys.number("rope_theta", kTheta);
  if (theta) rope.theta = *theta;
  const nlohmann::json* parameters = keys.take("rope_parameters");
  const nlohmann::json* scaling = keys.take("rope_scaling");
  if (parameters != nullptr && scaling != nullptr) {
    keys.refuse("rope_scaling", "only one of rope_parameters and rope_scaling");
  }
  const nlohmann::json* record = parameters != nullptr ? parameters : scaling;
  const std::string name = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  if (record != nullptr) {
    if (!record->is_object()) keys.refuse(name, "an object or null");
    read_rope_record(*record, name + ".", rope, unknown);
  }
  if (theta && rope.theta != *theta) keys.refuse("rope_theta", concat("the value in ", name));
  return rope;
}

nlohmann::ordered_json rope_scaling_json(const nn::RopeOptions& rope, std::string_view type_key) {
  const std::string key(type_key);
  if (rope.type == nn::RopeType::kDefault) return nullptr;
  if (rope.type == nn::RopeType::kLlama3) {
    return {{"factor", rope.factor},
            {"high_freq_factor", rope.high_freq_factor},
            {"low_freq_factor", rope.low_freq_factor},
            {"original_max_position_embeddings", rope.original_max_position_embeddings},
            {key, "llama3"}};
  }
  TESSERA_INVARIANT(rope.type == nn::RopeType::kYarn,
                    "a kind of rope that this record does not have");
  nlohmann::ordered_json json;
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) json[name] = *value;
  };
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

}  // namespace tessera::models
