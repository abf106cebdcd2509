// Runs of the program on a small model that has layers enough for four ranks and a V.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"
#include "cli/same_bits.h"
#include "support/process.h"

namespace tessera::cli {

/// run.toml trains four steps; model.json has eight layers and its own head, tied.json the
/// embedding's, moe.json four experts a layer, short.json two layers.
struct PipelineFolder : SmallRun {
  PipelineFolder() {
    write_variant(
        "model.json",
        {{"num_hidden_layers", 8}, {"num_key_value_heads", 2}, {"initializer_range", 0.05}});
    write_variant("tied.json", {{"tie_word_embeddings", true}});
    write_variant("short.json", {{"num_hidden_layers", 2}});
    write_variant("moe.json", {{"architectures", {"Qwen3MoeForCausalLM"}},
                               {"model_type", "qwen3_moe"},
                               {"num_experts", 4},
                               {"num_experts_per_tok", 2},
                               {"moe_intermediate_size", 16},
                               {"norm_topk_prob", true}});
  }

  /// model.json with changes.
  void write_variant(const std::string& name, const nlohmann::json& changes) const {
    auto model = nlohmann::json::parse(read_file(*this / "model.json"));
    model.update(changes);
    write(name, model.dump());
  }
};

/// So many ranks of each layout, one behind the other; micro-batches are rows.
inline Words training(const std::string& run, int ranks, int micro_batches, const Words& more) {
  return joined({"train", "run.toml", "--nproc", std::to_string(ranks), "--job.dump_folder", run,
                 "--training.global_batch_size", std::to_string(micro_batches),
                 "--metrics.enable_tensorboard", "false"},
                more);
}

inline Words as_pipeline(int ranks, const std::string& schedule) {
  return {"--parallelism.pipeline_parallel_degree", std::to_string(ranks), "--pipeline.schedule",
          schedule};
}

/// The values of each line of metrics.jsonl that do not depend on the time.
inline std::vector<nlohmann::json> numbers(const std::filesystem::path& run) {
  std::istringstream text(read_so_far(run / "metrics/metrics.jsonl"));
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(text, line);) {
    auto step = nlohmann::json::parse(line);
    for (const char* timed : {"step_ms", "tps", "tps_global", "tflops", "peak_rss_mib",
                              "exchange_ms", "exchange_hidden_ms"}) {
      step.erase(timed);
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

/// A validation before the first step has a line of its own.
inline std::int64_t steps_in(const std::vector<nlohmann::json>& lines) {
  return std::ranges::count_if(lines, [](const auto& line) { return line.at("step") > 0; });
}

}  // namespace tessera::cli
