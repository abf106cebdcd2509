// Rope in both spellings at once, as exporters write it for two versions of transformers: drawn
// ropes of every family that has one, equal, and different in one value.

#include <nlohmann/json.hpp>
#include <random>

#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::rope_spelling_test {
namespace {

using nlohmann::json;

using Draw = std::mt19937_64;

bool coin(Draw& draw) { return draw() % 2 == 0; }
/// Halves, which JSON and double hold exactly.
double between(Draw& draw, int least, int most) {
  return std::uniform_int_distribution<int>(2 * least, 2 * most)(draw) / 2.0;
}

/// The parts of one rope that both spellings share, and what each adds.
struct DrawnRope {
  json record;  ///< without theta
  double theta = 0.0;
  double local_theta = 0.0;  ///< of Gemma 3's sliding layers
  std::int64_t positions = 0;
};

DrawnRope drawn_rope(Draw& draw) {
  DrawnRope rope{.record = json::object(),
                 .theta = 1000 * between(draw, 1, 5000),
                 .local_theta = 1000 * between(draw, 1, 5000),
                 .positions = std::uniform_int_distribution<int>(64, 1 << 20)(draw)};
  const char* kinds[] = {"default", "linear", "llama3", "yarn"};
  const std::string kind = kinds[draw() % 4];
  json& record = rope.record;
  record[coin(draw) ? "rope_type" : "type"] = kind;
  if (kind == "default") return rope;
  record["factor"] = between(draw, 1, 64);
  if (kind == "linear") return rope;
  if (coin(draw)) record["original_max_position_embeddings"] = draw() % 65536 + 64;
  if (kind == "llama3") {
    record["low_freq_factor"] = between(draw, 1, 2);
    record["high_freq_factor"] = between(draw, 4, 8);
    return rope;
  }
  if (coin(draw)) record["beta_fast"] = between(draw, 16, 64);
  if (coin(draw)) record["beta_slow"] = between(draw, 1, 2);
  if (coin(draw)) record["attention_factor"] = between(draw, 1, 3);
  if (coin(draw)) record["truncate"] = false;
  if (coin(draw)) record.update({{"mscale", 1.0}, {"mscale_all_dim", between(draw, 1, 2)}});
  return rope;
}

struct Spelling {
  const char* folder;
  bool by_layer_type = false;   ///< rope_parameters has a record a type of layers
  bool turns_a_part = false;    ///< partial_rotary_factor is a key of the family
  bool needs_a_record = false;  ///< without one the family is refused
};

void PrintTo(const Spelling& spelling, std::ostream* out) { *out << spelling.folder; }

class RopeSpellings : public ::testing::TestWithParam<Spelling> {
 protected:
  json without_rope() const {
    json config = ConfigOfFolder(GetParam().folder).json();
    for (const char* key : {"rope_scaling", "rope_theta", "rope_local_base_freq",
                            "partial_rotary_factor", "initial_context_length"}) {
      config.erase(key);
    }
    return config;
  }
  json with_positions(const DrawnRope& rope) const {
    json config = without_rope();
    config["max_position_embeddings"] = rope.positions;
    return config;
  }
  json new_keys(const DrawnRope& rope) const {
    json record = rope.record;
    record["rope_theta"] = rope.theta;
    if (GetParam().turns_a_part) record["partial_rotary_factor"] = 1.0;
    if (!GetParam().by_layer_type) return {{"rope_parameters", record}};
    return {
        {"rope_parameters",
         {{"full_attention", record},
          {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", rope.local_theta}}}}}};
  }
  json old_keys(const DrawnRope& rope) const {
    json keys{{"rope_theta", rope.theta}, {"rope_scaling", rope.record}};
    if (GetParam().turns_a_part) keys["partial_rotary_factor"] = 1.0;
    if (GetParam().by_layer_type) keys["rope_local_base_freq"] = rope.local_theta;
    return keys;
  }
  /// With its kind as "rope_type" where records lie by type of layers: there transformers reads no
  /// other key.
  static DrawnRope drawn(Draw& draw) {
    DrawnRope rope = drawn_rope(draw);
    const auto kind = rope.record.find("type");
    if (GetParam().by_layer_type && kind != rope.record.end()) {
      rope.record["rope_type"] = *kind;
      rope.record.erase("type");
    }
    return rope;
  }
  static json joined(json config, const std::vector<json>& keys) {
    for (const json& each : keys) config.update(each);
    return config;
  }
};

TEST_P(RopeSpellings, BothTogetherAreReadAsEitherAlone) {
  Draw draw(20261128);
  for (int i = 0; i < 40; ++i) {
    const DrawnRope rope = drawn(draw);
    json old = old_keys(rope);
    const bool is_default = rope.record.size() == 1 && !rope.record.contains("factor");
    if (is_default && !GetParam().needs_a_record && coin(draw)) old["rope_scaling"] = nullptr;
    const json config = with_positions(rope);
    const std::string both = joined(config, {new_keys(rope), old}).dump();
    SCOPED_TRACE(both);
    const ModelSpec spec = parse_spec(both).spec;
    EXPECT_EQ(spec, parse_spec(joined(config, {new_keys(rope)}).dump()).spec);
    EXPECT_EQ(spec, parse_spec(joined(config, {old}).dump()).spec);
    EXPECT_EQ(spec.rope.theta, rope.theta);
    EXPECT_EQ(spec, parse_spec(config_json(spec)).spec);
    json empty = old;
    empty["rope_scaling"] = json::object();
    EXPECT_EQ(spec, parse_spec(joined(config, {new_keys(rope), empty}).dump()).spec);
  }
}

TEST_P(RopeSpellings, ADifferenceInAnyValueIsRefusedWithBoth) {
  Draw draw(20261129);
  for (int i = 0; i < 60; ++i) {
    const DrawnRope rope = drawn(draw);
    json old = old_keys(rope);
    std::vector<std::string> keys{"rope_theta"};
    if (GetParam().by_layer_type) keys.emplace_back("rope_local_base_freq");
    for (const auto& [key, value] : rope.record.items()) {
      if (value.is_number() && !key.starts_with("mscale")) keys.push_back(key);
    }
    const std::string key = keys[draw() % keys.size()];
    json& changed = old.contains(key) ? old[key] : old["rope_scaling"][key];
    const json before = changed;
    changed = before.get<double>() * 2;
    if (before.is_number_integer()) changed = before.get<std::int64_t>() * 2;
    const std::string text = joined(with_positions(rope), {new_keys(rope), old}).dump();
    SCOPED_TRACE(text);
    EXPECT_THAT(config_refusal(text), Says(key, before.dump(), changed.dump()));
  }
}

/// Whether a record leaves frequencies and attention as they are.
bool scales_nothing(const json& record) {
  return record.value("factor", 1.0) == 1.0 && record.value("attention_factor", 1.0) == 1.0;
}

// Records of any kind that scale nothing mean the same.
TEST_P(RopeSpellings, KindsThatScaleNothingAgree) {
  const json records[] = {
      {{"rope_type", "default"}},
      {{GetParam().by_layer_type ? "rope_type" : "type", "linear"}, {"factor", 1.0}},
      {{"rope_type", "yarn"}, {"factor", 1.0}, {"original_max_position_embeddings", 77}},
      {{"rope_type", "llama3"},
       {"factor", 1.0},
       {"low_freq_factor", 1.0},
       {"high_freq_factor", 4.0}}};
  for (const json& one : records) {
    for (const json& other : records) {
      const DrawnRope first{.record = one, .theta = 5e4, .local_theta = 1e4, .positions = 4321};
      DrawnRope second = first;
      second.record = other;
      const json config = with_positions(first);
      EXPECT_EQ(parse_spec(joined(config, {new_keys(first), old_keys(second)}).dump()).spec,
                parse_spec(joined(config, {new_keys(first)}).dump()).spec)
          << one << other;
      second.theta = second.local_theta = 6e4;
      EXPECT_THAT(config_refusal(joined(config, {new_keys(first), old_keys(second)}).dump()),
                  Says("rope_theta", "60000.0", "50000.0"));
    }
  }
}

// As transformers, which warns of such keys and reads them for no kind but their own.
TEST_P(RopeSpellings, KeysOfOtherKindsAreIgnoredByName) {
  Draw draw(20261202);
  const json others{{"attention_factor", 2.0},
                    {"beta_fast", 16.0},
                    {"factor", 2.0},
                    {"finetuned", true},
                    {"high_freq_factor", 4.0},
                    {"long_factor", {1.0, 2.0}},
                    {"low_freq_factor", 1.0},
                    {"mscale", 0.7},
                    {"original_max_position_embeddings", 77},
                    {"truncate", true}};
  for (int i = 0; i < 60; ++i) {
    const DrawnRope rope = drawn(draw);
    DrawnRope more = rope;
    const std::string kind = rope.record.value("rope_type", rope.record.value("type", ""));
    const std::vector<std::string> own =
        kind == "default"  ? std::vector<std::string>{}
        : kind == "linear" ? std::vector<std::string>{"factor"}
        : kind == "llama3"
            ? std::vector<std::string>{"factor", "high_freq_factor", "low_freq_factor",
                                       "original_max_position_embeddings"}
            : std::vector<std::string>{"factor",    "attention_factor",
                                       "beta_fast", "mscale",
                                       "truncate",  "original_max_position_embeddings"};
    std::size_t added = 0;
    for (const auto& [key, value] : others.items()) {
      if (std::ranges::count(own, key) > 0 || coin(draw)) continue;
      more.record[key] = value;
      ++added;
    }
    for (const bool old : {false, true}) {
      const auto read = [&](const DrawnRope& each) {
        return parse_spec(
            joined(with_positions(each), {old ? old_keys(each) : new_keys(each)}).dump());
      };
      const ParsedSpec found = read(more);
      EXPECT_EQ(found.spec, read(rope).spec) << more.record;
      EXPECT_EQ(found.ignored_keys.size(), added) << more.record;
    }
  }
}

// As transformers: how far the positions go beyond the original ones.
TEST_P(RopeSpellings, AFactorOfNullIsWorkedOutForYarnAlone) {
  const json yarn{
      {"rope_type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 1000}};
  DrawnRope rope{.record = yarn, .theta = 1e4, .local_theta = 1e4, .positions = 2500};
  for (const json& keys : {new_keys(rope), old_keys(rope)}) {
    EXPECT_EQ(parse_spec(joined(with_positions(rope), {keys}).dump()).spec.rope.factor, 2.5);
  }
  rope.positions = 500;
  EXPECT_THAT(config_refusal(joined(with_positions(rope), {new_keys(rope)}).dump()),
              Says("factor: found null", "500", "1000"));
  rope.record = {{"rope_type", "linear"}, {"factor", nullptr}};
  EXPECT_THAT(config_refusal(joined(with_positions(rope), {new_keys(rope)}).dump()),
              Says("factor: found null"));
}

TEST_P(RopeSpellings, AnotherKindIsRefusedWithBoth) {
  Draw draw(20261130);
  for (int i = 0; i < 40; ++i) {
    const DrawnRope one = drawn(draw);
    DrawnRope other = drawn(draw);
    other.theta = one.theta;
    other.local_theta = one.local_theta;
    const auto kind = [](const DrawnRope& rope) {
      return rope.record.value("rope_type", rope.record.value("type", ""));
    };
    if (kind(one) == kind(other)) continue;
    if (scales_nothing(one.record) && scales_nothing(other.record)) continue;
    const std::string text = joined(with_positions(one), {new_keys(one), old_keys(other)}).dump();
    EXPECT_THAT(config_refusal(text),
                Says("rope_scaling", concat(kind(other), ", but ", kind(one))))
        << text;
  }
}

// As transformers: what the record does not say is what the model was made for.
TEST_P(RopeSpellings, AnAbsentOriginalLengthIsThatOfThePositions) {
  for (const json& record :
       {json{{"rope_type", "yarn"}, {"factor", 4.0}}, json{{"rope_type", "llama3"},
                                                           {"factor", 8.0},
                                                           {"low_freq_factor", 1.0},
                                                           {"high_freq_factor", 4.0}}}) {
    const DrawnRope rope{.record = record, .theta = 1e4, .local_theta = 1e4, .positions = 4321};
    for (const json& keys : {new_keys(rope), old_keys(rope)}) {
      const ModelSpec spec = parse_spec(joined(with_positions(rope), {keys}).dump()).spec;
      EXPECT_EQ(spec.rope.original_max_position_embeddings, 4321) << keys;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , RopeSpellings,
    ::testing::Values(
        Spelling{"llama-fp32"}, Spelling{"qwen2-fp32"}, Spelling{"qwen3-fp32"},
        Spelling{"mistral-fp32"}, Spelling{"olmo2-fp32"}, Spelling{"granite-fp32"},
        Spelling{"smollm3-fp32"}, Spelling{"qwen3-moe-fp32"}, Spelling{"mixtral-fp32"},
        Spelling{.folder = "gpt-oss-fp32", .needs_a_record = true}, Spelling{"deepseek-v2-fp32"},
        Spelling{"deepseek-v3-fp32"}, Spelling{.folder = "glm4-moe-fp32", .turns_a_part = true},
        Spelling{.folder = "qwen3-next-fp32", .turns_a_part = true}, Spelling{"llama4-text-fp32"},
        Spelling{.folder = "gemma3-text-fp32", .by_layer_type = true}),
    [](const auto& tested) {
      std::string name = tested.param.folder;
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST(RopeSpelling, PositionsOutsideTheRecordsCountWhereTheseHaveNone) {
  const ConfigOfFolder config("llama-fp32");
  const json yarn{{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(config.spec({{"rope_scaling", yarn}, {"original_max_position_embeddings", 77}})
                .rope.original_max_position_embeddings,
            77);
  json other = yarn;
  other["original_max_position_embeddings"] = 78;
  EXPECT_THAT(config.refusal({{"rope_scaling", other}, {"original_max_position_embeddings", 77}}),
              Says("original_max_position_embeddings: found 77", "78"));
}

// transformers takes rope_scaling with the family's theta then, and so none of the two.
TEST(RopeSpelling, AThetaThatOnlyOneOfThemHasIsRefused) {
  const ConfigOfFolder config("llama-fp32");
  json keys = config.json();
  keys.erase("rope_theta");
  keys["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  keys["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 5e5}};
  EXPECT_THAT(config_refusal(keys.dump()),
              Says("rope_theta: 10000.0 (meant without the key, which rope_scaling lacks), but"
                   " 500000.0 there"));
}

}  // namespace
}  // namespace tessera::models::rope_spelling_test
