// NCCL and the part of c10d that our backend calls of it, between threads on simulated devices.
//
// src/comm/backends/nccl is compiled unchanged against a class with c10d's name (the folder torch/
// next to this file) that keeps NCCL's rules. The k-th call of a communicator is one operation on
// all ranks, of one kind, size and dtype, or nothing ends. A collective runs on the current stream,
// a message on a stream of the pair. Both read and write when all ranks have launched them, so what
// is launched after one waits until then (simulator.h), and an access that is not ordered after it
// is a race. Ranks connect inside the first call that needs them, which blocks the host. There are
// no tags. Sums are formed in the dtype that travels, in the order of ranks from sum_from() on,
// each addition rounded.
//
// It cannot show NCCL's use of time and memory, its own errors, and c10d's threads.
#pragma once

#include <string>
#include <vector>

namespace tessera::sim {

/// The rank whose addend is the first one; 0 at first. NCCL has an order of its own.
void sum_from(int rank);

/// Returns what was found since the last call and not thrown: operations that some ranks never
/// launched, and collectives that ranks launched in such orders that devices which take them one
/// after the other would wait for each other.
std::vector<std::string> take_nccl_findings();

}  // namespace tessera::sim
