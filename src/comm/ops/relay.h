// Relay: the pattern by which every rank sends a small message to every other rank in
// ceil(log2 N) rounds.
//
// This is the dissemination pattern, for any number N of ranks. In round k each rank sends to the
// rank 2^k after it and receives from the rank 2^k before it. A message that is combined on the way
// (bits that any rank sets) keeps its size. The message of a gather doubles each round: a rank
// sends as many bytes as if it had sent its part to every other rank, in log2 N messages instead of
// N - 1. Large collectives are sent directly: their bytes cost more than their messages, and a sum
// in rank order cannot be formed on the way. Pure: no torch header. Next: steps.h.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::comm::relay {

/// The rank that a rank sends to in one round, and the rank that it receives from.
struct Round {
  int to = 0;
  int from = 0;
};

int rounds(int ranks);
Round round_of(int round, int rank, int ranks);

/// The ranks with which `rank` exchanges a message in some round, ascending.
std::vector<int> partners(int rank, int ranks);

/// Divides all other ranks into waves of at most `most` (2 or more), the nearest ranks first. If
/// rank a is in the k-th wave of rank b, then b is in the k-th wave of a: ranks that connect wave
/// by wave never wait for each other in different waves.
std::vector<std::vector<int>> waves(int rank, int ranks, int most);

/// The rank whose part of a gather is at `place` on `rank`. Each rank stores the parts in the order
/// in which they arrive: its own first, then that of the rank before it, and so on, cyclically.
int rank_at(int place, int rank, int ranks);
/// The place on `rank` of the part of rank `part`: the inverse of rank_at().
int place_of(int part, int rank, int ranks);

/// The number n of parts of a gather that are sent in a round. The sender reads them from its
/// places [0, n); the receiver stores them at its places [2^round, 2^round + n).
int parts_sent(int round, int ranks);

/// The offsets at which the places of a gather on `rank` begin, and the end of the last place. The
/// part of rank r has lengths[r] bytes.
std::vector<std::int64_t> begins(const std::vector<std::int64_t>& lengths, int rank);

/// Combines one round of a sum of integers. `values` is this rank's state before the round, and
/// `received` that of the sender; `received` becomes this rank's state after the round. A state is
/// [2, n]. Row 0 holds the sums over 2^round ranks, cyclically, of which the last is the rank of
/// the state. Row 1 holds the sums over the last (ranks mod 2^round) of these; before the first
/// round it holds zeros. So no sum counts a rank twice: a bit may be combined twice, an addend may
/// not.
void add_round(int round, int ranks, std::int64_t n, const std::int64_t* values,
               std::int64_t* received);
/// The row of a state [2, n] that holds the sum over all ranks after the last round.
int row_of_sum(int ranks);

/// The bytes that `rank` sends in all rounds of a gather.
std::int64_t gathered_bytes_sent(const std::vector<std::int64_t>& lengths, int rank);

}  // namespace tessera::comm::relay
