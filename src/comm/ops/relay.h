// Relay: how a small message goes from everyone to everyone in ceil(log2 N) rounds.
//
// The dissemination pattern, for any number of ranks: in round k each rank sends to the one 2^k
// after it and receives from the one 2^k before it. What can be combined on the way (bits that any
// rank sets) keeps its size; what everyone needs of everyone (a gather) doubles each round, and
// comes to as many bytes as if all had sent to all, in log2 N messages instead of N - 1. Large
// collectives stay direct: their bytes cost more than their messages, and a sum in rank order
// cannot be formed on the way. Pure. Next: steps.h.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::comm::relay {

struct Round {
  int to = 0;
  int from = 0;
};

int rounds(int ranks);
Round round_of(int round, int rank, int ranks);

/// With whom a rank exchanges something in any round, ascending.
std::vector<int> partners(int rank, int ranks);

/// All other ranks in chunks of at most `most` (2 or more), the nearest first: two ranks stand
/// in each other's wave of the same number, so nobody waits for one that is at another wave for
/// ever.
std::vector<std::vector<int>> waves(int rank, int ranks, int most);

/// Of a gather: every rank keeps the parts in the order in which they come to it, its own first,
/// then that of the rank before it, and so on round.
int rank_at(int place, int rank, int ranks);
int place_of(int part, int rank, int ranks);

/// Places that are sent in a round, [0, n), and that they take at the receiver, [2^round, + n).
int parts_sent(int round, int ranks);

/// Where each place begins, and where the last one ends, if rank r's part is lengths[r] long.
std::vector<std::int64_t> begins(const std::vector<std::int64_t>& lengths, int rank);

/// One round of a sum of whole numbers. `values` and `received` are [2, n]: the sums of the 2^round
/// ranks that end at their rank, and those of the last (ranks mod 2^round) of these, nothing at
/// first. `received` becomes what this rank has after the round. Windows of ranks, and no rank
/// twice: unlike bits, a number that is added twice is wrong.
void add_round(int round, int ranks, std::int64_t n, const std::int64_t* values,
               std::int64_t* received);
/// Which row of [2, n] has the sum of all after the last round.
int row_of_sum(int ranks);

/// Of a whole gather, by `rank`.
std::int64_t gathered_bytes_sent(const std::vector<std::int64_t>& lengths, int rank);

}  // namespace tessera::comm::relay
