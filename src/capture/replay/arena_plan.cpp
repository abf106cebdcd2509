#include "capture/replay/arena_plan.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "tessera/error.h"

namespace tessera::capture {
namespace {

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

bool meet(const Lifetime& a, const Lifetime& b) { return a.first <= b.last && b.first <= a.last; }

/// Returns the lowest offset at which `bytes` fit between `taken`, ranges in order of their begin.
std::int64_t lowest_gap(const std::vector<std::pair<std::int64_t, std::int64_t>>& taken,
                        std::int64_t bytes) {
  std::int64_t at = 0;
  for (const auto& [begin, end] : taken) {
    if (begin - at >= bytes) break;
    at = std::max(at, end);
  }
  return at;
}

}  // namespace

ArenaPlan plan_arena(const std::vector<Lifetime>& lifetimes) {
  std::vector<std::size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(-lifetimes[a].bytes, a) < std::pair(-lifetimes[b].bytes, b);
  });
  ArenaPlan plan{std::vector<std::int64_t>(lifetimes.size(), 0), 0};
  std::vector<std::size_t> placed;
  for (const std::size_t each : order) {
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (const std::size_t other : placed) {
      if (!meet(lifetimes[each], lifetimes[other])) continue;
      taken.emplace_back(plan.offsets[other],
                         plan.offsets[other] + aligned(lifetimes[other].bytes));
    }
    std::sort(taken.begin(), taken.end());
    const std::int64_t bytes = aligned(lifetimes[each].bytes);
    plan.offsets[each] = lowest_gap(taken, bytes);
    plan.bytes = std::max(plan.bytes, plan.offsets[each] + bytes);
    placed.push_back(each);
  }
  return plan;
}

std::vector<std::string> faults_of(const ArenaPlan& plan, const std::vector<Lifetime>& lifetimes) {
  std::vector<std::string> faults;
  if (plan.offsets.size() != lifetimes.size()) {
    faults.push_back(
        concat("found ", plan.offsets.size(), " offsets, expected ", lifetimes.size()));
    return faults;
  }
  for (std::size_t i = 0; i < lifetimes.size(); ++i) {
    const std::int64_t begin = plan.offsets[i], end = begin + lifetimes[i].bytes;
    if (begin < 0 || begin % kArenaAlignment != 0 || end > plan.bytes) {
      faults.push_back(concat("buffer ", i, ": found bytes ", begin, " to ", end,
                              ", expected a multiple of ", kArenaAlignment, " inside of ",
                              plan.bytes));
    }
    for (std::size_t j = 0; j < i; ++j) {
      const std::int64_t other = plan.offsets[j];
      const bool shares = begin < other + lifetimes[j].bytes && other < end;
      if (shares && meet(lifetimes[i], lifetimes[j])) {
        faults.push_back(concat("buffers ", j, " and ", i,
                                ": found that they share bytes while both are needed"));
      }
    }
  }
  return faults;
}

}  // namespace tessera::capture
