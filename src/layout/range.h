// Half-open ranges: of elements, rows, positions or ranks' parts; the equal split into parts; and
// which rank sends which elements of a parameter to which other one when its layout changes.
//
// Pure. Moves are between two layouts of one run (fsdp/trainable.cpp); reading a checkpoint elsewhere
// is the same question to files instead of ranks, answered piece by piece in
// io/checkpoint_folder.h. Next: bucket_plan.h, tensor_box.h for parts along several dims.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tessera/error.h"

namespace tessera::layout {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
  bool operator==(const Range&) const = default;
};

/// Empty ranges come out as {0, 0}.
inline Range intersect(const Range& a, const Range& b) {
  const Range both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Range{} : both;
}

/// Part `part` of `total` cut into `parts` contiguous ones, the first ones one longer where the
/// total does not divide.
inline Range part_of(std::int64_t total, int parts, int part) {
  TESSERA_INVARIANT(total >= 0 && part >= 0 && part < parts, "no such part");
  const std::int64_t each = total / parts;
  const std::int64_t longer = total % parts;  // parts with one more
  const std::int64_t begin = part * each + std::min<std::int64_t>(part, longer);
  return {begin, begin + each + (part < longer ? 1 : 0)};
}

/// Elements of one parameter that rank `to` takes from rank `from`, which may be itself.
struct Move {
  Range range;
  int from = 0;
  int to = 0;
  bool operator==(const Move&) const = default;
};

/// before[r] and after[r]: the elements that rank r holds; they may overlap (replicated parameters)
/// and be empty. What a rank holds already it takes from itself, the rest from the lowest rank that
/// has it. In the order of `to`, then of elements. Errors: kInternal for elements that are wanted
/// and nobody holds.
std::vector<Move> plan_moves(const std::vector<Range>& before, const std::vector<Range>& after);

}  // namespace tessera::layout
