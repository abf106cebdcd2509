// The first host of a Slurm step, as `scontrol` says.
//
// Slurm gives a step its hosts as a list ("node[01-03,7],gpu5") whose syntax is its own, and no
// address. Only where neither MASTER_ADDR nor the user says one, scontrol is asked to spell the
// list out: one short process, no shell, a limit on its time and on what is read. Pure. Next:
// launch_environment.h, which says whether that is needed.
#pragma once

#include <chrono>
#include <string>

#include "launch/launch_environment.h"

namespace tessera::comm {

/// scontrol only reads files of its host for this.
inline constexpr std::chrono::seconds kScontrolPatience{10};

/// Fills in `launch.master_addr` from `launch.node_list` if there is none yet.
/// Errors: kUsage when scontrol is missing, fails, gives no answer within `limit`, or answers with
/// anything but host names.
void find_first_host(LaunchEnvironment& launch, std::chrono::milliseconds limit);

}  // namespace tessera::comm
