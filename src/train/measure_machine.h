// Measures the machine that this rank is on, with the kernels and the transport that a run uses.
//
// All ranks compute at once, each with the threads that a run gives it, since they share caches and
// links; the slowest rank counts. Takes seconds. Next: ../check/machine.h.
#pragma once

#include <string>
#include <vector>

#include "check/machine.h"
#include "tessera/world.h"

namespace tessera::train {

struct MeasuredMachine {
  check::Machine machine;
  std::vector<std::string> notes;  ///< what each line was measured by, and what was not
};

/// The same on every rank. Bandwidth and latency are those of all-gathers: among the ranks of a host,
/// and where there are several hosts among all ranks. Collective. Errors: kUsage where hosts have
/// different numbers of ranks; kComm.
MeasuredMachine measure_machine(World& world);

}  // namespace tessera::train
