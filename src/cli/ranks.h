// From one command to ranks that run it: under a launcher, by own spawn, or in this process alone.
//
// The parent of own spawn only waits and accesses nothing of libtorch; its children run the same
// command line and come back here as ranks. Next: launch/launch_environment.h, launch/spawn.h.
#pragma once

#include <functional>
#include <optional>

#include "cli/program_end.h"
#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::cli {

/// As `device` and [comm] say.
WorldOptions world_options(const train::Config& config);

using RankBody = std::function<void(World& world, RunPhase& phase)>;

/// Runs `body` on every rank and returns the exit code for main(). `config` is validated; it gives
/// the degrees, the device and [comm]. A failing rank reports and leaves without returning
/// ([Note: failure]).
/// Errors: kUsage for --nproc that a launcher contradicts, for contradictory variables and for
/// fewer devices than own spawn is to start ranks ("auto" takes the CPU then), kConfig for degrees
/// that the number of ranks does not allow; both before any rank starts.
int run_ranks(const train::Config& config, std::optional<int> nproc, const RankBody& body);

}  // namespace tessera::cli
