#include "layout/range.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::layout {
namespace {

/// Takes from `missing` the elements that `held` has, and adds them to `moves`.
void take(std::vector<Range>& missing, const Range& held, int from, int to,
          std::vector<Move>& moves) {
  std::vector<Range> left;
  for (const Range& range : missing) {
    const Range part = intersect(range, held);
    if (part.empty()) {
      left.push_back(range);
      continue;
    }
    moves.push_back({part, from, to});
    if (range.begin < part.begin) left.push_back({range.begin, part.begin});
    if (part.end < range.end) left.push_back({part.end, range.end});
  }
  missing = std::move(left);
}

}  // namespace

std::vector<Move> plan_moves(const std::vector<Range>& before, const std::vector<Range>& after) {
  std::vector<Move> moves;
  for (std::size_t to = 0; to < after.size(); ++to) {
    std::vector<Range> missing;
    if (!after[to].empty()) missing.push_back(after[to]);
    const auto first = moves.size();
    if (to < before.size()) {
      take(missing, before[to], static_cast<int>(to), static_cast<int>(to), moves);
    }
    for (std::size_t from = 0; from < before.size() && !missing.empty(); ++from) {
      take(missing, before[from], static_cast<int>(from), static_cast<int>(to), moves);
    }
    TESSERA_INVARIANT(missing.empty(), "redistribution: found elements [", missing.front().begin,
                      ", ", missing.front().end, ") that rank ", to, " needs and no rank holds");
    std::sort(moves.begin() + static_cast<std::ptrdiff_t>(first), moves.end(),
              [](const Move& a, const Move& b) { return a.range.begin < b.range.begin; });
  }
  return moves;
}

}  // namespace tessera::layout
