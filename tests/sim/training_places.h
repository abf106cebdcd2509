// `tessera train` in a place: which places and kinds of runs are tried, on ranks that are threads
// or in a process that no launcher has started.
#pragma once

#include <filesystem>

#include "dist/training_run.h"
#include "support/place.h"
#include "support/temporary_folder.h"
#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::sim {

inline const test::Place kPlaces[] = {{"sim", false}, {"sim:0", true}};

std::string shown(const test::Place& where, const test::RanksOfRun& layout);

/// In a run folder of its own, in `folder`.
test::RunLosses train_in(const test::Place& where, const test::RanksOfRun& layout,
                         const train::Config& config, const TemporaryFolder& folder,
                         const test::HooksOf& hooks = {});

/// Runs `body` as in a process that no launcher has started, on a thread that ends with its World.
void alone(const std::string& device, const std::function<void(World&)>& body);
/// So, in the run folder `run`, printing nothing.
void train_alone(const std::string& device, const train::Config& config,
                 const std::filesystem::path& run);

/// The options of a run.
struct RunKind {
  const char* name;
  std::function<void(train::Config&, const TemporaryFolder&)> set;
  double tolerance = 1e-5;  ///< of its losses, compared with the CPU's
};
const std::vector<RunKind>& run_kinds();

/// small_run with experts that a bf16 run on one rank multiplies without a read of the host.
train::Config experts_run(const TemporaryFolder& folder, int layers = 2);

}  // namespace tessera::sim
