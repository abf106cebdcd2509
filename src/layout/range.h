// Half-open ranges: of elements, rows, positions or ranks' parts; and the equal split into parts.
//
// Pure. Next: bucket_plan.h, tensor_box.h for parts along several dims.
#pragma once

#include <algorithm>
#include <cstdint>

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

}  // namespace tessera::layout
