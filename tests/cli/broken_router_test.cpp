// A router that produces NaN ends a run on several ranks with one error, in every layout.

#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::broken_router_test {
namespace {

constexpr const char* kFolder = TESSERA_TEST_DATA "/qwen3-moe-fp32";

/// The folder as m/, a router's weights all NaN.
void write_broken_model(const TemporaryFolder& folder) {
  std::string bytes = read_file(std::filesystem::path(kFolder) / "model.safetensors");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  const auto& router = header.at("model.layers.2.mlp.gate.weight");
  ASSERT_EQ(router.at("dtype"), "F32");
  const auto begin = router.at("data_offsets").at(0).get<std::size_t>();
  const auto end = router.at("data_offsets").at(1).get<std::size_t>();
  bytes.replace(8 + header_bytes + begin, end - begin, end - begin, '\xff');
  folder.write("m/model.safetensors", bytes);
  folder.write("m/config.json", read_file(std::filesystem::path(kFolder) / "config.json"));
}

TEST(BrokenRouter, IsExitCodeOneAndNamedInEveryLayout) {
  const TemporaryFolder folder;
  write_broken_model(folder);
  const std::vector<std::vector<std::string>> layouts{
      {"--nproc", "1"},
      {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"},
      {"--nproc", "2", "--parallelism.expert_parallel_degree", "2"}};
  for (const auto& layout : layouts) {
    EXPECT_THAT(run_program(folder, joined({"gradients", "--model", "m", "--batch",
                                            std::string(kFolder) + "/reference.safetensors",
                                            "--out", "o.safetensors"},
                                           layout)),
                Exits(1, "routing: found", "not finite"));
  }
}

}  // namespace
}  // namespace tessera::cli::broken_router_test
