// Where a run takes place: which rank this process is, how many there are and on which device. What
// starts a run (launch(), a verb of the program) reads it once, before any rank connects.
//
// Next: launch/launch_environment.h reads the variables, launch/spawn.h starts ranks,
// failure_report.h says how one fails.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "launch/launch_environment.h"
#include "tessera/world.h"

namespace tessera::comm {

struct RunPlace {
  LaunchEnvironment launch;
  int ranks = 1;               ///< without a launcher this process may still have to start them
  std::string device = "cpu";  ///< WorldOptions::device of every rank

  bool launched() const { return launch.launcher != Launcher::kSingle; }
};

/// As the environment and `options` say; one rank where nobody launched this process. Errors:
/// kUsage of read_launch_environment().
RunPlace read_place(const WorldOptions& options);

/// Calls `as_rank` where this process is a rank, else starts this program as `place.ranks` ranks
/// (spawn_ranks) and returns their exit code. Own spawn decides the device of all: "auto" is the CPU,
/// and the log says so, where each cannot have one. Errors: kUsage where too few were asked for,
/// before any rank starts; those of spawn_ranks.
int run_at(RunPlace place, const WorldOptions& options,
           const std::function<int(const RunPlace&)>& as_rank);

/// World::connect of the rank that this process is. Collective.
std::shared_ptr<World> connect_at(const RunPlace& place, WorldOptions options);

}  // namespace tessera::comm
