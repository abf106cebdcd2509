// RunPlace: which rank this process is, how many ranks there are, and on which device. The code
// that starts a run (launch(), a verb of the program) reads it once, before any rank connects.
//
// Next: launch/launch_environment.h reads the variables, launch/spawn.h starts ranks,
// failure_report.h says how one fails.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "launch/launch_environment.h"
#include "tessera/world.h"

namespace tessera::comm {

struct RunPlace {
  LaunchEnvironment launch;
  int ranks = 1;               ///< of the run; without a launcher start_ranks() starts them
  std::string device = "cpu";  ///< WorldOptions::device of every rank

  bool launched() const { return launch.launcher != Launcher::kSingle; }
};

/// Reads the launcher's variables and takes the device of `options`. Has one rank where no launcher
/// started this process. Errors: kUsage of read_launch_environment().
RunPlace read_place(const WorldOptions& options);

/// Starts this program as `place.ranks` ranks (spawn_ranks) and returns their exit code, unless
/// this process is a rank itself. Own spawn decides the device of all ranks: where "auto" finds too
/// few for them, all take the CPU, and the log says so. Errors: kUsage where "cuda" finds too few,
/// before any rank starts; those of spawn_ranks.
std::optional<int> start_ranks(RunPlace& place, const WorldOptions& options);

/// World::from_store. Collective.
std::shared_ptr<World> connect_over(const StorePtr& store, int rank, int size,
                                    WorldOptions options);

/// Connects the rank that this process is, as World::connect does. Collective.
std::shared_ptr<World> connect_at(const RunPlace& place, WorldOptions options);

}  // namespace tessera::comm
