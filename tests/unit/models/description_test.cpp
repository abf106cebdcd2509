#include "models/description.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "support/test.h"
#include "unit/models/small_spec.h"

namespace tessera::models::description_test {
namespace {

namespace fs = std::filesystem;

ModelSpec spec_at(const fs::path& file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return parse_spec(text.str(),
                    {.unknown_keys = UnknownKeys::kRefuse, .purpose = Purpose::kInference})
      .spec;
}

std::string_view text_of(InitKind init) {
  switch (init) {
    case InitKind::kNormal:
      return "normal";
    case InitKind::kOnes:
      return "ones";
    case InitKind::kZeros:
      return "zeros";
    case InitKind::kUniform:
      return "uniform";
    case InitKind::kLogOfUniform:
      return "log of uniform";
    case InitKind::kLogOfNumber:
      return "log of number";
    case InitKind::kInverseSoftplus:
      return "inverse softplus";
  }
  return "?";
}

std::string_view text_of(DecayClass decay) {
  switch (decay) {
    case DecayClass::kMatrix:
      return "matrix";
    case DecayClass::kEmbedding:
      return "embedding";
    case DecayClass::kNorm:
      return "norm";
    case DecayClass::kBias:
      return "bias";
    case DecayClass::kConvolution:
      return "convolution";
  }
  return "?";
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += concat(text.empty() ? "[" : ", ", size);
  return text + "]";
}

/// "tp2 ep2 etp2 whole": the stream between layers is whole there.
std::string text_of(const ParallelDims& degrees) {
  std::string text = concat("tp", degrees.tp);
  if (degrees.ep > 1) text += concat(" ep", degrees.ep);
  if (degrees.etp > 1) text += concat(" etp", degrees.etp);
  if (degrees.sequence == SequenceParallel::kNo) text += " whole";
  return text;
}

std::string text_of(const ParameterSpec& row) {
  std::string text = concat(row.name, " ", text_of(row.shape), " ", text_of(row.init));
  if (row.init_std != 0) text += concat(" ", row.init_std);
  text += concat(" ", text_of(row.decay), row.unit.empty() ? "" : " in ", row.unit);
  if (!row.tied_to.empty()) text += concat(" tied to ", row.tied_to);
  if (!row.stacked.empty()) {
    text += concat(" of ", row.stacked.size(), " x ", text_of(row.stacked_shape), " ",
                   row.stacked.front(), " to ", row.stacked.back());
  }
  return text + "\n";
}

/// A line a parameter, under it its placements with the degrees that give them; then buffers and
/// units.
std::string text_of(const ModelSpec& spec) {
  const ModelDescription whole = describe(spec);
  std::vector<std::vector<std::pair<std::string, std::string>>> placements(whole.parameters.size());
  for (const ParallelDims& degrees :
       {ParallelDims{.tp = 2}, ParallelDims{.tp = 2, .sequence = SequenceParallel::kNo},
        ParallelDims{.tp = 4}, ParallelDims{.ep = 2}, ParallelDims{.tp = 2, .ep = 2},
        ParallelDims{.tp = 2, .etp = 2}, ParallelDims{.tp = 2, .ep = 2, .etp = 2}}) {
    if (!spec.moe && (degrees.ep > 1 || degrees.etp > 1)) continue;
    try {
      check_degrees(spec, degrees);
    } catch (const Error&) {
      continue;
    }
    const ModelDescription part = describe(spec, {}, degrees);
    for (std::size_t i = 0; i < part.parameters.size(); ++i) {
      ParameterSpec row = part.parameters[i];
      if (row.layout == ParameterLayout()) continue;
      const std::string layout = to_string(row.layout);
      auto found = std::ranges::find(placements[i], layout, [](auto& each) { return each.first; });
      if (found == placements[i].end()) {
        found = placements[i].insert(found, {layout, ""});
      }
      found->second += concat(found->second.empty() ? "" : ", ", text_of(degrees));
      row.layout = {};
      EXPECT_TRUE(row == whole.parameters[i])
          << row.name << ": only its placement depends on ranks";
    }
  }
  std::string text;
  for (std::size_t i = 0; i < whole.parameters.size(); ++i) {
    text += text_of(whole.parameters[i]);
    for (const auto& [layout, degrees] : placements[i]) {
      text += concat("  ", degrees, ": ", layout, "\n");
    }
  }
  for (const BufferSpec& row : whole.buffers) {
    text += concat("buffer ", row.name, " ", text_of(row.shape), " ", text_of(row.init), "\n");
  }
  for (const std::string& unit : whole.units) text += concat("unit ", unit, "\n");
  return text;
}

// Sizes that are accepted do not overflow: of what was found by fuzzing, and what is at the limits.
TEST(Description, OfAnyAcceptedTextOverflowsNothing) {
  int described = 0;
  for (const auto& entry : fs::directory_iterator(TESSERA_CORPUS "/hf_config")) {
    ModelSpec spec;
    try {
      spec = spec_at(entry.path());
    } catch (const Error&) {
      continue;
    }
    if (spec.num_hidden_layers > 8) continue;  // a description of thousands of rows shows no more
    ++described;
    std::int64_t total = 0;
    for (const ParameterSpec& row : describe(spec).parameters) {
      EXPECT_FALSE(__builtin_add_overflow(total, row.numel(), &total)) << entry.path();
      EXPECT_GT(row.numel(), 0) << entry.path();
    }
  }
  EXPECT_GT(described, 0);
}

// A change of a family or a layer is reviewed here: files, contracts and plans all follow from it.
TEST(Description, OfEachFamilyIsTheRecordedText) {
  for (const char* name : {"deepseek-v2-fp32", "deepseek-v2-group-fp32",
                           "deepseek-v3-fp32", "glm4-moe-fp32",
                           "llama4-text-fp32", "gemma4-fp32",
                           "gpt-oss-fp32",     "llama-fp32",
                           "mistral-fp32",     "qwen2-fp32",
                           "qwen3-fp32",       "qwen3-moe-fp32",
                           "mixtral-fp32",     "olmo2-fp32",
                           "gemma3-text-fp32", "gpt2-fp32",
                           "granite-fp32",     "smollm3-fp32",
                           "phi3-fp32",        "phi4-mini-fp32",
                           "qwen3-next-fp32",  "qwen3-5-text-fp32",
                           "nemotron-h-fp32"}) {
    const fs::path folder = fs::path(TESSERA_TEST_DATA) / name;
    const std::string text = text_of(spec_at(folder / "config.json"));
    std::stringstream recorded;
    recorded << std::ifstream(fs::path(TESSERA_DESCRIPTIONS) / concat(name, ".txt")).rdbuf();
    EXPECT_EQ(text, recorded.str());
  }
}

std::map<std::string, ParameterSpec> by_name(const std::vector<ParameterSpec>& table) {
  std::map<std::string, ParameterSpec> rows;
  for (const ParameterSpec& row : table) rows.emplace(row.name, row);
  return rows;
}

TEST(Description, Qwen3HasHuggingFaceNamesAndShapes) {
  const auto table = describe(small(Family::kQwen3)).parameters;
  const auto rows = by_name(table);
  EXPECT_EQ(rows.size(), table.size());
  EXPECT_EQ(table.size(), 1u + 2u * 11u + 2u);
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(table.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(table.back().name, "lm_head.weight");
  EXPECT_EQ(rows.at("model.layers.1.self_attn.q_proj.weight").shape, (Shape{64, 32}));
  EXPECT_EQ(rows.at("model.layers.1.self_attn.v_proj.weight").shape, (Shape{32, 32}));
  EXPECT_EQ(rows.at("model.layers.1.self_attn.o_proj.weight").shape, (Shape{32, 64}));
  EXPECT_EQ(rows.at("model.layers.0.self_attn.k_norm.weight").shape, (Shape{16}));
  EXPECT_EQ(rows.at("model.layers.0.mlp.down_proj.weight").shape, (Shape{32, 80}));
  EXPECT_EQ(rows.at("model.norm.weight").init, InitKind::kOnes);
  EXPECT_EQ(rows.at("model.norm.weight").decay, DecayClass::kNorm);
  EXPECT_EQ(rows.at("model.norm.weight").unit, "head");
  EXPECT_EQ(rows.at("model.layers.1.mlp.up_proj.weight").unit, "model.layers.1");
  EXPECT_EQ(rows.at("model.layers.1.mlp.up_proj.weight").init_std, 0.02);
}

TEST(Description, BiasesAndTiedHeadFollowTheSpec) {
  ModelSpec spec = small(Family::kLlama);
  spec.attention_bias = true;
  spec.mlp_bias = true;
  spec.tie_word_embeddings = true;
  const auto table = describe(spec).parameters;
  const auto rows = by_name(table);
  EXPECT_EQ(rows.count("model.layers.0.self_attn.q_norm.weight"), 0u);
  EXPECT_EQ(rows.at("model.layers.0.self_attn.o_proj.bias").init, InitKind::kZeros);
  EXPECT_EQ(rows.at("model.layers.0.mlp.gate_proj.bias").decay, DecayClass::kBias);
  EXPECT_EQ(rows.at("lm_head.weight").tied_to, "model.embed_tokens.weight");
  std::int64_t sum = 0;
  for (const ParameterSpec& row : table) sum += row.numel();
  EXPECT_EQ(total_numel(table), sum - 128 * 32);
}

// Layers of a vision tower have numbers in their names, too.
TEST(Description, SaysWhichLayerOfTheTextAndWhichPartAParameterIsOf) {
  const ModelSpec spec = spec_at(fs::path(TESSERA_TEST_DATA) / "gemma4-fp32" / "config.json");
  const LoraSpec lora = plan_lora(spec, {.rank = 2, .targets = {"layers.1.self_attn.q_proj"}});
  const auto rows = by_name(describe(spec, lora).parameters);
  const auto layer = [&](const std::string& name) { return rows.at(name).layer; };
  const auto part = [&](const std::string& name) { return rows.at(name).part; };
  const std::string text = "model.language_model.";
  const std::string vision = "model.vision_tower.";
  EXPECT_EQ(layer(text + "layers.0.self_attn.q_proj.weight"), 0);
  EXPECT_EQ(layer(text + "layers.1.self_attn.q_proj.lora_A.weight"), 1);
  EXPECT_EQ(layer(text + "layers.1.router.proj.weight"), 1);
  EXPECT_EQ(part(text + "layers.1.router.proj.weight"), ModelPart::kRouter);
  EXPECT_EQ(layer(text + "embed_tokens.weight"), std::nullopt);
  EXPECT_EQ(layer(text + "norm.weight"), std::nullopt);
  EXPECT_EQ(layer("lm_head.weight"), std::nullopt);
  int seeing = 0;
  for (const auto& [name, row] : rows) {
    const bool sees = name.starts_with(vision) || name.starts_with("model.embed_vision.");
    EXPECT_EQ(row.part == ModelPart::kVision, sees) << name;
    if (!sees) continue;
    EXPECT_EQ(row.layer, std::nullopt) << name;
    ++seeing;
  }
  EXPECT_GT(seeing, 0);
  EXPECT_TRUE(rows.contains(vision + "encoder.layers.0.self_attn.q_proj.linear.weight"));
  EXPECT_EQ(by_name(describe(small(Family::kQwen3)).parameters)
                .at("model.layers.1.mlp.up_proj.weight")
                .layer,
            1);
}

}  // namespace
}  // namespace tessera::models::description_test
