// A short run of a tiny Qwen3 of transformers' that every way of starting ranks must repeat, bit
// for bit.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace tessera::cli {

/// run.toml: its batches are given, one a step.
inline void write_golden_run(const TemporaryFolder& folder) {
  const std::string data = TESSERA_TEST_DATA "/qwen3-fp32";
  folder.write("run.toml", "[model]\npath = \"" + data + "\"\n[data]\npath = \"" + data +
                               "/reference.safetensors\"\n[training]\nsteps = 6\n[precision]\n"
                               "param_dtype = \"float32\"\n[optimizer]\nlr = 0.001\n[job]\n"
                               "dump_folder = \"run\"\n");
}

inline std::filesystem::path metrics_of(const TemporaryFolder& folder) {
  return folder / "run/metrics/metrics.jsonl";
}

/// Loss and norm of every step; the file has them with all their digits.
inline std::vector<std::pair<double, double>> losses_and_norms(const TemporaryFolder& folder) {
  std::vector<std::pair<double, double>> steps;
  std::istringstream text(read_so_far(metrics_of(folder)));
  for (std::string line; std::getline(text, line);) {
    const auto step = nlohmann::json::parse(line);
    steps.emplace_back(step.at("loss").get<double>(), step.at("grad_norm").get<double>());
  }
  return steps;
}

}  // namespace tessera::cli
