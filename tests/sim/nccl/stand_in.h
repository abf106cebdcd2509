// NCCL and the part of c10d that our backend calls of it, between threads on simulated devices.
//
// src/comm/backends/nccl is compiled as it is against a class of c10d's name (the folder torch/ beside
// this file) that keeps NCCL's rules: the k-th call of a communicator is one operation on all ranks,
// of one kind, size and dtype, or nothing ends; a collective runs on the current stream, a message on a
// stream of the pair; both read and write when all ranks have launched them, so what is launched behind
// one stands still until then (simulator.h), and what nothing orders behind it is a race; ranks connect
// inside the first call that needs them, which blocks the host; there are no tags. Sums are formed in
// the dtype that travels, in the order of ranks from sum_from() on, each addition rounded.
//
// What it cannot tell: what NCCL does with time, memory and errors of its own, and c10d's threads.
#pragma once

#include <string>
#include <vector>

namespace tessera::sim {

/// The rank whose addend is the first one; 0 at first. NCCL has an order of its own.
void sum_from(int rank);

/// What was found since the last call beyond what was thrown: operations that some ranks never
/// launched, and collectives that ranks launched in orders in which devices that take them one after
/// the other would wait for each other.
std::vector<std::string> take_nccl_findings();

}  // namespace tessera::sim
