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

/// The same on every rank. Bandwidth and latency are those of all-gathers: among the ranks of a
/// host, and where there are several hosts among all ranks. Collective. Errors: kUsage where hosts
/// have different numbers of ranks; kComm.
MeasuredMachine measure_machine(World& world);

/// Bytes of the host's memory that no process has.
double available_bytes();
/// Refuses to measure on the CPU where `local` of `ranks` ranks share a host with `available`
/// bytes: each copies, and gathers a slice of every rank. Errors: kUsage.
void require_memory_to_measure(int local, int ranks, double available);
/// The same of this rank's host; on a device nothing is refused. Collective. Errors: as
/// measure_machine.
void require_memory_to_measure(World& world);

}  // namespace tessera::train
