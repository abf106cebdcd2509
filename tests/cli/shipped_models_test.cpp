// The configs of real models resolve and plan on 64 ranks from config.json alone: as they are
// shipped (all ranks share one copy) and with layers and experts shared out as well.

#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::shipped_models_test {
namespace {

using nlohmann::json;

constexpr int kWorld = 64;
constexpr const char* kConfigs = TESSERA_CONFIGS;

using Words = std::vector<std::string>;
using Placements = std::map<std::string, std::string>;  ///< of parameters, by name

const Words kExpertParallel{"--parallelism.tensor_parallel_degree=8",
                            "--parallelism.expert_parallel_degree=8"};
const Words kExpertsCut{"--parallelism.tensor_parallel_degree=8",
                        "--parallelism.expert_parallel_degree=8",
                        "--parallelism.expert_tensor_parallel_degree=8"};

/// With tp 8 and ep 8 on 64 ranks, by name within the layer.
const std::string kRows = "tp 8 S(0), gradient S(0)";
const std::string kColumns = "tp 8 S(1), gradient S(1)";
const std::string kWhole = "tp 8 R, gradient P";
const std::string kWholeExperts = "ep 8 S(0), gradient S(0) (sparse mesh)";
const std::string kHalfCopies = "tp_kv/4 4 S(0), gradient S(0); tp_rep/2 2 R, gradient P";
const std::string kQuarterCopies = "tp_kv/2 2 S(0), gradient S(0); tp_rep/4 4 R, gradient P";

struct Model {
  std::string name;
  std::int64_t numel;      ///< as published, 15.7 billion and so on
  std::size_t parameters;  ///< the experts of a layer are two, or four with biases
  Placements placements;
  std::string cut_gate_up;  ///< of experts whose width tp shares out
  std::string cut_down;
  std::string decoder = "model.";        ///< what stands before the layer's name
  std::string experts = "mlp.experts.";  ///< within a layer
  std::string head = "lm_head.weight";   ///< of the head, or of the embedding that is one, too
  std::string layer = "layers.1.";       ///< one with experts, where there are any
};

void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

/// The part of the parameter that one rank of an axis that shares it has: 1 / this.
std::int64_t parts(const json& parameter) {
  std::int64_t product = 1;
  if (!parameter.contains("placement")) return product;
  const std::string text = parameter.at("placement");
  const std::regex part(R"(\S+ (\d+) S\(\d\),)");
  for (std::sregex_iterator each(text.begin(), text.end(), part), end; each != end; ++each) {
    product *= std::stoll((*each)[1]);
  }
  return product;
}

std::int64_t numel(const json& shape) {
  const auto sizes = shape.get<std::vector<std::int64_t>>();
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

class ShippedModels : public ::testing::TestWithParam<Model> {
 protected:
  void SetUp() override {
    std::filesystem::create_directory_symlink(kConfigs, folder_ / "configs");
  }
  std::string config() const { return "configs/" + GetParam().name + ".toml"; }

  json contract(const Words& degrees) const {
    const auto words = joined(
        {"inspect", "--contract", config(), "--world", std::to_string(kWorld), "--json"}, degrees);
    // 941 GB of weights: 4 GiB of address space hold the program, not the model.
    const Outcome outcome = succeeded(run_program(folder_, words, "prlimit --as=4294967296"));
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  }

  /// Each element of each parameter is kept once by the ranks that share it out.
  void expect_whole(const json& found, std::int64_t tensor_ranks = 1) const {
    constexpr auto npos = std::string::npos;
    ASSERT_EQ(found.at("world_size"), kWorld);
    std::map<std::string, json> by_name;
    std::int64_t all = 0;
    for (const json& parameter : found.at("parameters")) {
      by_name[parameter.at("name")] = parameter;
      all += numel(parameter.at("shape"));
    }
    EXPECT_EQ(all, GetParam().numel);
    EXPECT_EQ(by_name.size(), GetParam().parameters);
    std::size_t placed = 0;
    std::int64_t kept = 0;
    std::int64_t wanted = 0;
    for (const json& unit : found.at("units")) {
      for (const json& bucket : unit.at("buckets")) {
        std::int64_t used = 0;
        for (const json& place : bucket.at("parameters")) {
          const json& parameter = by_name.at(place.at("name"));
          const std::int64_t held = place.at("numel");
          EXPECT_EQ(held * parts(parameter), numel(parameter.at("shape"))) << place;
          const auto holders = bucket.at("ranks").get<std::int64_t>() * parts(parameter);
          // The vision tower is not cut: each rank of tp computes it, and has one.
          const bool sees = parameter.at("name").get<std::string>().find("vision") != npos;
          EXPECT_EQ(holders, sees ? kWorld / tensor_ranks : kWorld) << place;
          wanted += numel(parameter.at("shape")) * kWorld / holders;
          used += held;
          ++placed;
        }
        EXPECT_EQ(bucket.at("padding_numel"), bucket.at("numel").get<std::int64_t>() - used);
        EXPECT_EQ(bucket.at("numel"), bucket.at("slice_numel").get<std::int64_t>() *
                                          bucket.at("ranks").get<std::int64_t>());
        kept += bucket.at("shard_bytes").get<std::int64_t>();
      }
    }
    EXPECT_EQ(placed, by_name.size());
    EXPECT_EQ(found.at("shard_bytes"), kept);
    // fp32, and less than a thousandth of padding.
    EXPECT_GE(kept * kWorld, 4 * wanted);
    EXPECT_LE(kept * kWorld, 4 * (wanted + wanted / 1000));
  }

  /// As the file stands, but for experts that it shares out, all ranks share all of the model.
  void expect_planned_as_shipped() const {
    const json found = contract({"--parallelism.expert_parallel_degree=1"});
    ASSERT_FALSE(found.is_null());
    EXPECT_THAT(found.at("layout"), Says("dp_replicate 1 x dp_shard 64 x cp 1 x tp 1"));
    expect_whole(found);
    for (const json& parameter : found.at("parameters")) {
      const auto name = parameter.at("name").get<std::string>();
      // Norms, biases, sinks and scales; those of experts have two dims.
      const bool is_matrix = parameter.at("shape").size() > 1 && !name.ends_with("bias");
      if (!parameter.at("decay").is_null()) {
        EXPECT_EQ(parameter.at("decay").at("value"), is_matrix) << parameter;
      }
      EXPECT_FALSE(parameter.contains("placement")) << "all ranks share all of it: " << parameter;
      EXPECT_EQ(parameter.at("reductions").at("shard_axes"), json::array({"dp_shard"}));
    }
  }

  void expect_placed(const json& found, const Placements& expected) const {
    std::size_t seen = 0;
    for (const json& parameter : found.at("parameters")) {
      const auto place = expected.find(parameter.at("name"));
      if (place == expected.end()) continue;
      EXPECT_EQ(parameter.at("placement"), place->second) << place->first;
      ++seen;
    }
    EXPECT_EQ(seen, expected.size()) << "every one of these is a parameter";
  }

  const TemporaryFolder folder_;
};

TEST_P(ShippedModels, PlanAsTheyAreShippedFromConfigJsonAlone) { expect_planned_as_shipped(); }

TEST_P(ShippedModels, EveryPatternOfTheRulesMatchesAndDecidesADtype) {
  const std::string text = read_file(folder_ / config());
  const std::regex match(
      R"~(\[\[precision\.rule\]\][^\n]*\nmatch = (\[.*?\])\nparam_dtype = "(\w+)")~");
  std::size_t patterns = 0;
  const json found = contract({});
  ASSERT_FALSE(found.is_null());
  int rule = 0;
  for (std::sregex_iterator each(text.begin(), text.end(), match), end; each != end; ++each) {
    ++rule;
    for (const json& pattern : json::parse((*each)[1].str())) {
      const std::string reason =
          "rule " + std::to_string(rule) + " (" + pattern.get<std::string>() + ")";
      int matched = 0;
      for (const json& parameter : found.at("parameters")) {
        const json& compute = parameter.at("compute");
        if (!compute.at("reason").get<std::string>().starts_with(reason)) continue;
        EXPECT_EQ(compute.at("value"), (*each)[2].str()) << parameter.at("name");
        ++matched;
      }
      EXPECT_GT(matched, 0) << reason;
      ++patterns;
    }
  }
  const std::regex header(R"(\[\[precision\.rule\]\])");
  EXPECT_EQ(rule, std::distance(std::sregex_iterator(text.begin(), text.end(), header),
                                std::sregex_iterator()))
      << "a rule that this test cannot read";
  EXPECT_GE(patterns, 2U) << "norms and routers";
}

TEST_P(ShippedModels, LayersAndExpertsAreSharedOutByName) {
  const json found = contract(kExpertParallel);
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found.at("layout"), Says("dp_shard 8 x cp 1 x tp 8"));
  EXPECT_THAT(found.at("layout"), Says("dp_shard_mod_ep 8 x ep 8 x etp 1"));
  expect_whole(found, 8);
  Placements expected;
  const std::string decoder = GetParam().decoder;
  const std::string layer = decoder + GetParam().layer;
  for (const auto& [name, placement] : GetParam().placements) expected[layer + name] = placement;
  expected.insert({{decoder + "embed_tokens.weight", kRows},
                   {decoder + "norm.weight", kWhole},
                   {GetParam().head, kRows},
                   {layer + "self_attn.o_proj.weight", kColumns},
                   {layer + "input_layernorm.weight", kWhole},
                   {layer + GetParam().experts + "gate_up_proj", kWholeExperts},
                   {layer + GetParam().experts + "down_proj", kWholeExperts}});
  expect_placed(found, expected);
}

TEST_P(ShippedModels, TensorParallelExpertsAreCutInTheirWidth) {
  const json found = contract(kExpertsCut);
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found.at("layout"), Says("dp_shard_mod_ep 1 x ep 8 x etp 8"));
  expect_whole(found, 8);
  const std::string experts = GetParam().decoder + GetParam().layer + GetParam().experts;
  expect_placed(found, {{experts + "gate_up_proj", GetParam().cut_gate_up},
                        {experts + "down_proj", GetParam().cut_down}});
}

// A trillion parameters on 256 ranks, as the file stands: of each expert 4 ranks have a quarter,
// and a rank needs less than the 141 GB of the device that its comment names.
TEST(ShippedKimiK2, FitsOn256Ranks) {
  const TemporaryFolder folder;
  std::filesystem::create_directory_symlink(kConfigs, folder / "configs");
  const Words words{"inspect", "--contract", "configs/kimi-k2.toml", "--world", "256", "--json"};
  const Outcome outcome = succeeded(run_program(folder, words, "prlimit --as=4294967296"));
  ASSERT_EQ(outcome.code, 0);
  const json found = json::parse(outcome.out);
  EXPECT_THAT(found.at("layout"), Says("dp_shard_mod_ep 4 x ep 64 x etp 1"));
  const json& memory = found.at("rank_memory_bytes");
  EXPECT_LT(memory.at("activations").at("full").at("total"), 141'000'000'000);
  EXPECT_GT(memory.at("activations").at("none").at("total"), 141'000'000'000)
      << "recomputation is what makes it fit";
}

// 80 billion on 64 ranks of 80 GB, as the file stands; tp shares out key heads of layers with a
// state.
TEST(ShippedQwen3Next, FitsOn64RanksAndCutsStatesByKeyHeads) {
  const TemporaryFolder folder;
  std::filesystem::create_directory_symlink(kConfigs, folder / "configs");
  const auto contract = [&](const Words& more) {
    const Words words{"inspect", "--contract", "configs/qwen3-next-80b-a3b.toml",
                      "--world", "64",         "--json"};
    const Outcome outcome =
        succeeded(run_program(folder, joined(words, more), "prlimit --as=4294967296"));
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  };
  const json found = contract({});
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found.at("layout"), Says("dp_shard_mod_ep 8 x ep 8 x etp 1"));
  EXPECT_LT(found.at("rank_memory_bytes").at("activations").at("full").at("total"), 80'000'000'000);
  const json cut = contract(kExpertParallel);
  ASSERT_FALSE(cut.is_null());
  std::map<std::string, std::pair<std::string, std::string>> places;
  for (const json& each : cut.at("parameters")) {
    places[each.at("name")] = {each.at("placement"), each.at("compute").at("value")};
  }
  const std::string layer = "model.layers.1.linear_attn.";
  for (const char* name : {"in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias"}) {
    EXPECT_EQ(places.at(layer + name).first, kRows) << name;
  }
  EXPECT_EQ(places.at(layer + "conv1d.weight").first, kRows + " of rows 2048+2048+4096");
  EXPECT_EQ(places.at(layer + "norm.weight").first, kWhole);
  EXPECT_EQ(places.at(layer + "out_proj.weight").first, kColumns);
  EXPECT_EQ(places.at(layer + "A_log").second, "float32");
  EXPECT_EQ(places.at(layer + "dt_bias").second, "float32");
  EXPECT_EQ(places.at(layer + "conv1d.weight").second, "bfloat16");
}

/// Without experts.
class ShippedDenseModels : public ShippedModels {};

TEST_P(ShippedDenseModels, PlanAsTheyAreShippedFromConfigJsonAlone) { expect_planned_as_shipped(); }

TEST_P(ShippedDenseModels, LayersAreSharedOutByName) {
  const json found = contract({"--parallelism.tensor_parallel_degree=8"});
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found.at("layout"), Says("dp_shard 8 x cp 1 x tp 8"));
  expect_whole(found, 8);
  Placements expected{{"model.embed_tokens.weight", kRows},
                      {"model.norm.weight", kWhole},
                      {GetParam().head, kRows}};
  for (const auto& [name, placement] : GetParam().placements) {
    expected["model.layers.1." + name] = placement;
  }
  expect_placed(found, expected);
}

/// gate, up and down of experts one behind the other, [E, 2I, H] and [E, H, I]; of gpt-oss
/// transposed, gate and up in turn.
std::string cut_gate_up(const std::string& shape) {
  return "ep 8 S(0), gradient S(0); etp 8 S(2), gradient S(2) of " + shape + " (sparse mesh)";
}
const std::string kCutDown = "ep 8 S(0), gradient S(0); etp 8 S(2), gradient S(2) (sparse mesh)";
const std::string kCutTransposedGateUp = kCutDown;
const std::string kCutTransposedDown =
    "ep 8 S(0), gradient S(0); etp 8 S(1), gradient S(1) (sparse mesh)";

const Placements kLatentAttention{{"self_attn.kv_a_proj_with_mqa.weight", kWhole},
                                  {"self_attn.kv_a_layernorm.weight", kWhole},
                                  {"self_attn.kv_b_proj.weight", kRows},
                                  {"mlp.gate.weight", kWhole},
                                  {"mlp.shared_experts.gate_proj.weight", kRows},
                                  {"mlp.shared_experts.up_proj.weight", kRows},
                                  {"mlp.shared_experts.down_proj.weight", kColumns}};

Placements with(Placements all, const Placements& more) {
  all.insert(more.begin(), more.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    Configs, ShippedModels,
    ::testing::Values(Model{"deepseek-v2-lite", 15'706'484'224, 351,
                            with(kLatentAttention, {{"self_attn.q_proj.weight", kRows}}),
                            cut_gate_up("64x2x1408x2048"), kCutDown},
                      Model{"deepseek-v2", 235'741'434'880, 900,
                            with(kLatentAttention, {{"self_attn.q_a_proj.weight", kWhole},
                                                    {"self_attn.q_a_layernorm.weight", kWhole},
                                                    {"self_attn.q_b_proj.weight", kRows}}),
                            cut_gate_up("160x2x1536x5120"), kCutDown},
                      Model{"glm-4.5-air",
                            106'852'245'504,
                            690,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.q_proj.bias", kRows},
                             {"self_attn.k_proj.bias", kRows},
                             {"self_attn.v_proj.weight", kRows},
                             {"mlp.gate.weight", kWhole},
                             {"mlp.shared_experts.gate_proj.weight", kRows},
                             {"mlp.shared_experts.down_proj.weight", kColumns}},
                            cut_gate_up("128x2x1408x4096"),
                            kCutDown},
                      Model{"llama4-scout",
                            107'769'861'120,
                            579,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.k_proj.weight", kRows},
                             {"feed_forward.router.weight", kWhole},
                             {"feed_forward.shared_expert.up_proj.weight", kRows},
                             {"feed_forward.shared_expert.down_proj.weight", kColumns}},
                            "ep 8 S(0), gradient S(0); etp 8 S(3), gradient S(3) of "
                            "16x5120x2x8192 (sparse mesh)",
                            kCutTransposedDown,
                            "model.",
                            "feed_forward.experts."},
                      // The published 671 billion, without the layer that predicts further.
                      Model{"deepseek-v3", 671'026'404'352, 909,
                            with(kLatentAttention, {{"self_attn.q_a_proj.weight", kWhole},
                                                    {"self_attn.q_a_layernorm.weight", kWhole},
                                                    {"self_attn.q_b_proj.weight", kRows}}),
                            cut_gate_up("256x2x2048x7168"), kCutDown, "model.", "mlp.experts.",
                            "lm_head.weight", "layers.3."},
                      Model{"kimi-k2", 1'026'408'209'408, 915,
                            with(kLatentAttention, {{"self_attn.q_a_proj.weight", kWhole},
                                                    {"self_attn.q_a_layernorm.weight", kWhole},
                                                    {"self_attn.q_b_proj.weight", kRows}}),
                            cut_gate_up("384x2x2048x7168"), kCutDown},
                      Model{"gpt-oss-20b",
                            20'914'757'184,
                            411,
                            {{"self_attn.q_proj.bias", kRows},
                             {"self_attn.k_proj.weight", kRows},
                             {"self_attn.o_proj.bias", kWhole},
                             {"self_attn.sinks", kRows},
                             {"mlp.router.weight", kWhole},
                             {"mlp.router.bias", kWhole},
                             {"mlp.experts.gate_up_proj_bias", kWholeExperts},
                             {"mlp.experts.down_proj_bias", kWholeExperts}},
                            kCutTransposedGateUp,
                            kCutTransposedDown},
                      Model{"qwen3-30b-a3b",
                            30'532'122'624,
                            531,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.k_proj.weight", kHalfCopies},  // four heads on eight ranks
                             {"self_attn.v_proj.weight", kHalfCopies},
                             {"self_attn.q_norm.weight", kWhole},
                             {"mlp.gate.weight", kWhole}},
                            cut_gate_up("128x2x768x2048"),
                            kCutDown},
                      // Layer 3 attends; the three before it have a state, for which see below.
                      Model{"qwen3-next-80b-a3b",
                            79'674'391'296,
                            759,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.k_proj.weight", kQuarterCopies},  // two heads
                             {"self_attn.q_norm.weight", kWhole},
                             {"mlp.gate.weight", kWhole},
                             {"mlp.shared_expert.gate_proj.weight", kRows},
                             {"mlp.shared_expert.down_proj.weight", kColumns},
                             {"mlp.shared_expert_gate.weight", kWhole}},
                            cut_gate_up("512x2x512x2048"),
                            kCutDown,
                            "model.",
                            "mlp.experts.",
                            "lm_head.weight",
                            "layers.3."},
                      Model{"mixtral-8x7b",
                            46'702'792'704,
                            291,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.k_proj.weight", kRows},
                             {"self_attn.v_proj.weight", kRows},
                             {"block_sparse_moe.gate.weight", kWhole}},
                            cut_gate_up("8x2x14336x4096"),
                            kCutDown,
                            "model.",
                            "block_sparse_moe.experts."},
                      // Layer 1 slides and has a dense MLP next to the experts; the embedding is
                      // the head. 25.23 billion are the text's, 0.57 the frozen tower's.
                      Model{"gemma4-26b-a4b",
                            25'805'933'872,
                            981,
                            {{"self_attn.q_proj.weight", kRows},
                             {"self_attn.k_proj.weight", kRows},
                             {"self_attn.q_norm.weight", kWhole},
                             {"mlp.gate_proj.weight", kRows},
                             {"mlp.down_proj.weight", kColumns},
                             {"pre_feedforward_layernorm_2.weight", kWhole},
                             {"router.proj.weight", kWhole},
                             {"router.scale", kWhole},
                             {"router.per_expert_scale", kWhole}},
                            cut_gate_up("128x2x704x2816"),
                            kCutDown,
                            "model.language_model.",
                            "experts.",
                            "model.language_model.embed_tokens.weight"}),
    [](const auto& each) { return std::regex_replace(each.param.name, std::regex("[-.]"), "_"); });

INSTANTIATE_TEST_SUITE_P(Configs, ShippedDenseModels,
                         ::testing::Values(Model{"llama3_8b",
                                                 8'030'261'248,
                                                 291,
                                                 {{"self_attn.q_proj.weight", kRows},
                                                  {"self_attn.k_proj.weight", kRows},
                                                  {"self_attn.v_proj.weight", kRows},
                                                  {"self_attn.o_proj.weight", kColumns},
                                                  {"mlp.gate_proj.weight", kRows},
                                                  {"mlp.up_proj.weight", kRows},
                                                  {"mlp.down_proj.weight", kColumns},
                                                  {"input_layernorm.weight", kWhole}},
                                                 {},
                                                 {}}),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace tessera::cli::shipped_models_test
