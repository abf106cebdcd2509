// Half-open ranges: of elements, rows, positions or ranks' parts; the equal split into parts; and
// the moves of a parameter's elements between ranks when its layout changes.
//
// Pure. Moves are between two layouts of one run (fsdp/trainable.cpp). Reading a checkpoint into
// another layout is the same problem with files instead of ranks, solved piece by piece in
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

/// Returns the common elements; {0, 0} for none.
inline Range intersect(const Range& a, const Range& b) {
  const Range both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Range{} : both;
}

/// Returns part `part` of `total` cut into `parts` contiguous ones. The first ones are longer by
/// one where the total is not divisible.
inline Range part_of(std::int64_t total, int parts, int part) {
  TESSERA_INVARIANT(total >= 0 && part >= 0 && part < parts, "no such part");
  const std::int64_t each = total / parts;
  const std::int64_t longer = total % parts;  // parts with one more
  const std::int64_t begin = part * each + std::min<std::int64_t>(part, longer);
  return {begin, begin + each + (part < longer ? 1 : 0)};
}

/// The elements of one parameter that rank `to` takes from rank `from`, which may be itself.
struct Move {
  Range range;
  int from = 0;
  int to = 0;
  bool operator==(const Move&) const = default;
};

/// Returns the moves from one layout to another. before[r] and after[r]: the elements that rank r
/// holds; they may overlap (replicated parameters) and be empty. A rank takes elements that it
/// holds already from itself, the others from the lowest rank that has them. Ordered by `to`, then
/// by elements. Errors: kInternal for needed elements that no rank holds.
std::vector<Move> plan_moves(const std::vector<Range>& before, const std::vector<Range>& after);

}  // namespace tessera::layout
