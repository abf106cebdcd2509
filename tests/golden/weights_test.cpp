// Where weights come from: drawn alike under every layout, read without ever holding the model.
#include <ATen/ATen.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "models/description.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/parallelize.h"

namespace tessera::golden::weights_test {
namespace {

Tensors parameters_of(const train::Config& config, const Layout& layout) {
  Tensors parameters;
  test::ranks(layout.ranks, layout.backend).run([&](World& world) {
    const auto source = train::open_model(config.model);
    const auto dims = train::resolve_parallelism(config.parallelism, world.size());
    const auto model = train::parallelize(source, config, world.mesh(train::mesh_shape(dims)));
    model->visit_full_parameters([&](const std::string& name, const at::Tensor& parameter) {
      if (world.rank() == 0) parameters[name] = parameter.detach().clone();
    });
  });
  return parameters;
}

Tensors drawn(const std::string& folder, const Layout& layout, std::int64_t seed = 42) {
  auto config = config_for(layout);
  config.model.config = data_folder(folder) / "config.json";
  config.debug.seed = seed;
  return parameters_of(config, layout);
}

TEST(GoldenInitialWeights, AreTheSameBitsUnderEveryLayout) {
  for (const std::string folder : {"qwen3-fp32", "llama-mixed"}) {
    const auto expected = drawn(folder, {.ranks = 1});
    ASSERT_EQ(expected.size(), Reference::of(folder).parameters().size());
    for (const Layout& layout :
         {Layout{.ranks = 2}, Layout{.ranks = 3}, Layout{.ranks = 2, .replicas = 2},
          Layout{.ranks = 4, .replicas = 2}, Layout{.ranks = 3, .backend = ThreadBackend::kGloo}}) {
      SCOPED_TRACE(concat(folder, ", ", to_string(layout)));
      expect_same_bits(drawn(folder, layout), expected);
    }
  }
}

TEST(GoldenInitialWeights, AreNormalForMatricesAndOneForNorms) {
  const auto weights = drawn("qwen3-fp32", {.ranks = 3});
  for (const auto& [name, weight] : weights) {
    if (weight.dim() == 1) {
      EXPECT_TRUE(weight.eq(1).all().item<bool>()) << name;
      continue;
    }
    // initializer_range 0.02 and at least 1024 values: 5 standard errors are 11 % of it.
    EXPECT_NEAR(weight.std().item<double>(), 0.02, 0.0023) << name;
    EXPECT_NEAR(weight.mean().item<double>(), 0.0, 5 * 0.02 / 32) << name;
  }
  EXPECT_FALSE(at::equal(weights.at("model.layers.0.mlp.up_proj.weight"),
                         weights.at("model.layers.1.mlp.up_proj.weight")));
}

TEST(GoldenInitialWeights, DependOnTheSeed) {
  const auto one = drawn("qwen3-fp32", {.ranks = 2}, 1);
  const auto other = drawn("qwen3-fp32", {.ranks = 2}, 2);
  EXPECT_FALSE(at::equal(one.at("lm_head.weight"), other.at("lm_head.weight")));
}

TEST(GoldenLoadedWeights, AreTheFilesBitsUnderEveryLayout) {
  for (const auto& folder : kFolders) {
    for (const Layout& layout :
         {Layout{.ranks = 1}, Layout{.ranks = 3}, Layout{.ranks = 4, .replicas = 2}}) {
      SCOPED_TRACE(concat(folder, ", ", to_string(layout)));
      auto config = config_for(layout);
      config.model.path = model_folder(folder, Spelling::kHub, Files::kSeveral);
      expect_same_bits(parameters_of(config, layout), Reference::of(folder).parameters());
    }
  }
}

// 95 MB in fp32: five layers of 15.7 MB, embedding and head of 8.4 MB each.
constexpr const char* kBigConfig = R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
  "head_dim": 64, "intermediate_size": 2048, "hidden_act": "silu", "vocab_size": 4096,
  "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-06,
  "attention_bias": false, "tie_word_embeddings": false, "torch_dtype": "float32"})";

struct BigModel {
  std::int64_t bytes = 0;
  std::int64_t largest_unit_bytes = 0;
};

BigModel write_big_model(const TemporaryFolder& folder) {
  folder.write("config.json", kBigConfig);
  BigModel model;
  std::map<std::string, std::int64_t> units;
  std::vector<TensorSpec> specs;
  for (const auto& parameter : models::describe(models::parse_spec(kBigConfig).spec).parameters) {
    const auto bytes = parameter.numel() * size_of(DType::kFloat32);
    model.bytes += bytes;
    model.largest_unit_bytes = std::max(model.largest_unit_bytes, units[parameter.unit] += bytes);
    specs.push_back({parameter.name, DType::kFloat32, parameter.shape});
  }
  SafetensorsWriter writer(folder / "model.safetensors", specs);
  std::vector<std::byte> noise(std::size_t{16} << 20);
  std::uint32_t state = 1;
  for (auto& byte : noise) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U & 0x3FU);  // finite floats, small ones
  }
  for (const auto& spec : specs) {
    const auto bytes = writer.header().find(spec.name)->size_bytes();
    writer.write(spec.name, std::span(noise).first(static_cast<std::size_t>(bytes)));
  }
  writer.finish();
  return model;
}

/// Runs golden/load_memory.cpp: by how many bytes each of two process ranks grew at its peak.
/// Larger blocks than 64 KiB go back to the system when they are freed, so that only what is held
/// is counted.
std::vector<std::int64_t> growth_of_two_ranks(const TemporaryFolder& folder,
                                              const std::string& how) {
  const auto out = folder / "growth.txt";
  const std::string command = concat(
      "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT "
      "OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=65536 timeout 60 '" TESSERA_LOAD_MEMORY "' '",
      data_folder("qwen3-fp32").string(), "' '", folder.path().string(), "' ", how, " > '",
      out.string(), "'");
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  std::vector<std::int64_t> growth;
  std::ifstream lines(out);
  for (std::int64_t bytes = 0; lines >> bytes;) growth.push_back(bytes);
  return growth;
}

TEST(GoldenLoadingMemory, OfTwoRanksIsAShardAndAUnitAndNeverTheModel) {
  const TemporaryFolder folder;
  const auto model = write_big_model(folder);
  // A chunk of the loader is 4 MiB of the file and its copy; the rest is small blocks and the grain
  // of pages.
  constexpr std::int64_t kConstant = std::int64_t{12} << 20;
  const auto limit = model.bytes / 2 + model.largest_unit_bytes + kConstant;
  ASSERT_LT(limit, model.bytes) << "the test would not see a loader that holds everything";

  const auto loaded = growth_of_two_ranks(folder, "shards");
  ASSERT_EQ(loaded.size(), 2U);
  for (const auto bytes : loaded) {
    EXPECT_LE(bytes, limit);
    EXPECT_GE(bytes, model.bytes / 2) << "a shard was not even filled: what is measured?";
  }
  // The same measure of loaders that do hold everything.
  for (const std::string how : {"copies", "pages"}) {
    const auto held = growth_of_two_ranks(folder, how);
    ASSERT_EQ(held.size(), 2U);
    for (const auto bytes : held) EXPECT_GT(bytes, limit) << how;
  }
}

}  // namespace
}  // namespace tessera::golden::weights_test
