// Folders whose weights or layer list are wrong: a router that produces NaN ends a run on several
// ranks with one error, in every layout; parameters of a state that are not finite, and tensors that
// the layer list does not have, are refused by name.

#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::broken_router_test {
namespace {

const std::filesystem::path kData = TESSERA_TEST_DATA;

/// Writes a folder of the reference data as m/, with all bytes of a tensor this one: 0xff is NaN.
void write_broken_model(const TemporaryFolder& folder, const std::string& of,
                        const std::string& tensor) {
  std::string bytes = read_file(kData / of / "model.safetensors");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  const auto& broken = header.at(tensor);
  ASSERT_EQ(broken.at("dtype"), "F32");
  const auto begin = broken.at("data_offsets").at(0).get<std::size_t>();
  const auto end = broken.at("data_offsets").at(1).get<std::size_t>();
  bytes.replace(8 + header_bytes + begin, end - begin, end - begin, '\xff');
  folder.write("m/model.safetensors", bytes);
  folder.write("m/config.json", read_file(kData / of / "config.json"));
}

Outcome gradients_of(const TemporaryFolder& folder, const std::string& batch_of,
                     const std::vector<std::string>& layout) {
  return run_program(folder, joined({"gradients", "--model", "m", "--batch",
                                     (kData / batch_of / "reference.safetensors").string(), "--out",
                                     "o.safetensors"},
                                    layout));
}

TEST(BrokenRouter, IsExitCodeOneAndNamedInEveryLayout) {
  const TemporaryFolder folder;
  write_broken_model(folder, "qwen3-moe-fp32", "model.layers.2.mlp.gate.weight");
  const std::vector<std::vector<std::string>> layouts{
      {"--nproc", "1"},
      {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"},
      {"--nproc", "2", "--parallelism.expert_parallel_degree", "2"}};
  for (const auto& layout : layouts) {
    EXPECT_THAT(gradients_of(folder, "qwen3-moe-fp32", layout),
                Exits(1, "routing: found", "not finite"));
  }
}

// Naive: the router behind the layer is the first to see them, and takes the blame.
TEST(BrokenStates, AreNamedWhenTheyAreLoaded) {
  const std::vector<std::string> one{"--nproc", "1"};
  const std::vector<std::string> cut{"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"};
  for (const auto& [of, tensor, layout] :
       {std::tuple{"qwen3-next-fp32", "model.layers.0.linear_attn.A_log", one},
        std::tuple{"qwen3-next-fp32", "model.layers.2.linear_attn.dt_bias", cut},
        std::tuple{"nemotron-h-fp32", "backbone.layers.4.mixer.D", one}}) {
    const TemporaryFolder folder;
    write_broken_model(folder, of, tensor);
    EXPECT_THAT(gradients_of(folder, of, layout),
                Exits(2, concat("tensor ", tensor, ": found NaN, expected finite numbers")));
  }
}

/// The folder of the reference data as m/, with another value of a key, or without it.
Outcome with_key(const std::string& of, const std::string& key, const nlohmann::json& value) {
  const TemporaryFolder folder;
  auto config = nlohmann::json::parse(read_file(kData / of / "config.json"));
  config[key] = value;
  folder.write("m/config.json", config.dump());
  folder.write("m/model.safetensors", read_file(kData / of / "model.safetensors"));
  return gradients_of(folder, of, {"--nproc", "1"});
}

TEST(BrokenLayerList, IsNamedWhereTheFolderHasOtherTensors) {
  EXPECT_THAT(
      with_key("nemotron-h-fp32", "layers_block_type", {"mamba", "moe", "attention", "mlp"}),
      Exits(2, "found the tensor backbone.layers.4.",
            "hybrid_override_pattern or "
            "layers_block_type of config.json says which layers there are"));
  const std::string full = "full_attention", linear = "linear_attention";
  const nlohmann::json moved{full, linear, linear};
  for (const nlohmann::json& value : {nlohmann::json(), moved}) {
    EXPECT_THAT(with_key("qwen3-next-fp32", "layer_types", value),
                Exits(2, "found no tensor model.layers.",
                      "layer_types or full_attention_interval of "
                      "config.json says which layers there are"));
  }
}

}  // namespace
}  // namespace tessera::cli::broken_router_test
