// ContextCut: which positions of a row each rank of the context-parallel axis holds.
//
// A row is cut into equal, contiguous parts; each part has an owner, and every rank has the same
// number of parts. The parts, not the ranks, fix the order of sums over queries: runs whose cuts
// have the same parts have the same bits, on one rank or on several. Pure, so that all ranks
// compute the same cut from the same rows. Head and tail: Megatron-LM's and torch's load balancing
// of a causal mask. Next: ../nn/context_region.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layout/range.h"

namespace tessera::layout {

struct ContextCut {
  int ranks = 1;
  std::int64_t positions = 0;    ///< T, of a whole row
  std::vector<int> owner = {0};  ///< the rank that has each part

  int parts() const { return static_cast<int>(owner.size()); }
  std::int64_t part_size() const { return positions / parts(); }
  std::int64_t positions_of_rank() const { return positions / ranks; }
  Range part(int number) const { return {number * part_size(), (number + 1) * part_size()}; }
  /// Returns the numbers of a rank's parts, ascending: its positions in the order in which it holds
  /// them.
  std::vector<int> parts_of(int rank) const;
  /// Returns the same positions as ranges, neighbours joined.
  std::vector<Range> runs_of(int rank) const;
  /// Returns the same positions one by one.
  std::vector<std::int64_t> places_of(int rank) const;
  bool operator==(const ContextCut&) const = default;
};

/// Gives rank r the r-th of 2 * ranks pieces from the head and the r-th from the tail, which
/// balances a causal mask of one document a row. A piece is parts / (2 * ranks) parts. Errors:
/// kConfig as check_cut and check_parts.
ContextCut head_tail(std::int64_t positions, int ranks, int parts);

/// Gives the part with the most work first, to the rank with the least work that still has room;
/// ties by number. Then the most loaded rank exchanges a part for a smaller one of another rank, as
/// long as that lowers the larger load of the two. `work`: of each part, for instance its pairs of
/// query and key. The work of two ranks differs by at most that of the largest part less that of
/// the smallest. Errors: kConfig as check_cut, and for work that is negative or not finite.
ContextCut by_work(std::int64_t positions, int ranks, std::span<const double> work);

/// Errors: kConfig for parts that are no multiple of twice the ranks, where there are several, and
/// for more than 1,024 and 8 for each rank.
void check_parts(int ranks, int parts);

/// Errors: kConfig for parts that do not divide the positions, with the nearest valid lengths, or
/// for ranks that do not divide the parts.
void check_cut(std::int64_t positions, int ranks, int parts);

/// "8 parts of 128 over 2 ranks: 0 1 1 0 0 1 1 0".
std::string to_string(const ContextCut& cut);
std::uint64_t hash(const ContextCut& cut);

}  // namespace tessera::layout
