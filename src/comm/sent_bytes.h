// What one rank sends for a collective: the one place where it is worked out.
//
// As sends and receives between pairs of ranks (exchange.h), which asks here in how many rounds a
// sum travels, and holds what it has posted against sent_bytes(); traces and tests ask the same
// function. The in-process backend moves nothing: there it is what the same ranks would send over
// Gloo. NCCL has its own ways. Next: ../../docs/communication.md.
#pragma once

#include <cstdint>

#include "comm/group.h"

namespace tessera::comm {

/// Elements of a tensor.
struct Stretch {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t numel() const { return end - begin; }
};

/// Whether each rank sums a stretch and sends it round; else everyone sends everything to everyone.
bool in_two_rounds(const AllReduce& op, int ranks);
/// Whether it travels over other ranks (relay.h).
bool is_relayed(const Op& op, int ranks);
/// What `rank` sums of an all-reduced tensor that travels in two rounds: parts as equal as can be.
Stretch summed_by(const AllReduce& op, int ranks, int rank);

/// By `rank` of `ranks`, to all others together.
std::int64_t sent_bytes(const Op& op, int ranks, int rank);
std::int64_t sent_bytes(const Batch& batch, int ranks, int rank);

}  // namespace tessera::comm
