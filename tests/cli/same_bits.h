// Compares what a run left with an undisturbed one, bit for bit.
#pragma once

#include <sstream>

#include "cli/program.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"

namespace tessera::cli {

inline CheckpointStore store_of(const TemporaryFolder& folder, const std::string& run) {
  return CheckpointStore(folder / (run + "/checkpoint"));
}

/// All ranks' files of a step are those of the undisturbed run.
inline void expect_same_bits(const CheckpointStore& found, const CheckpointStore& expected,
                             std::int64_t step, int ranks = 2) {
  CheckpointFolder::open(found.complete(step)).verify_all();
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string file = "rank_" + std::to_string(rank) + ".safetensors";
    const auto wanted = read_file(expected.complete(step) / file);
    EXPECT_FALSE(wanted.empty());
    EXPECT_TRUE(read_file(found.complete(step) / file) == wanted) << file << " of step " << step;
  }
}

/// A line a step: step, loss and norm with all their digits, no times.
inline std::vector<std::string> losses(const std::filesystem::path& run) {
  std::istringstream text(read_so_far(run / "metrics/metrics.jsonl"));
  std::vector<std::string> found;
  for (std::string line; std::getline(text, line);) {
    found.push_back(line.substr(0, line.find("\"lr\"")));
  }
  return found;
}

}  // namespace tessera::cli
