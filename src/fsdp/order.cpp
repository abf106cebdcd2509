#include "fsdp/order.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::fsdp {

std::uint64_t Trace::hash() const {
  // FNV-1a over the ids; 0 is never returned, so that it can stand for "no trace".
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&](std::uint64_t value) {
    for (int byte = 0; byte < 4; ++byte) {
      hash ^= (value >> (8 * byte)) & 0xffU;
      hash *= 0x100000001b3ULL;
    }
  };
  for (const auto unit : units) add(unit);
  add(units.size());
  for (const auto position : exits) add(position);
  return hash == 0 ? 1 : hash;
}

namespace {

/// Fills issues, needed and ahead from the rest.
void plan_issues(const Trace& trace, const std::vector<std::vector<UnitId>>& prefetch,
                 BackwardOrder& order) {
  const auto count = order.positions.size();
  std::vector<bool> issued(count, false);  // by place
  const auto issue = [&](std::size_t place) {
    if (place >= count || issued[place]) return;
    issued[place] = true;
    if (order.gathers[order.positions[place]]) order.issues.push_back(order.positions[place]);
  };
  for (std::size_t place = 0; place < count; ++place) {
    issue(place);
    order.needed.push_back(order.issues.size());
    const auto unit = trace.units[order.positions[place]];
    if (unit >= prefetch.size() || prefetch[unit].empty()) {
      issue(place + 1);
    } else {
      for (const auto wanted : prefetch[unit]) {
        auto next = place + 1;
        while (next < count && (issued[next] || trace.units[order.positions[next]] != wanted))
          ++next;
        issue(next);
      }
    }
    order.ahead.push_back(order.issues.size());
  }
}

}  // namespace

BackwardOrder backward_order(const Trace& trace, const std::vector<bool>& reshards, bool keep_last,
                             const std::vector<std::vector<UnitId>>& prefetch,
                             const std::vector<bool>& reached) {
  BackwardOrder order;
  const auto count = trace.units.size();
  order.gathers.assign(count, false);
  order.places.assign(count, count);
  for (const auto position : trace.exits) order.places.at(position) = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (order.places[i] == count) order.positions.push_back(i);  // its forward has not ended yet
    const bool kept = keep_last && i + 1 == count;
    order.gathers[i] = reshards.at(trace.units[i]) && !kept && (reached.empty() || reached.at(i));
  }
  order.positions.insert(order.positions.end(), trace.exits.rbegin(), trace.exits.rend());
  for (std::size_t place = 0; place < count; ++place) order.places[order.positions[place]] = place;
  plan_issues(trace, prefetch, order);
  std::vector<bool> seen(reshards.size(), false);
  for (const auto unit : trace.units) {
    if (!seen.at(unit)) order.reductions.push_back(unit);
    seen[unit] = true;
  }
  std::reverse(order.reductions.begin(), order.reductions.end());
  return order;
}

std::string first_difference(const std::vector<std::vector<std::string>>& names_by_rank) {
  std::size_t longest = 0;
  for (const auto& names : names_by_rank) longest = std::max(longest, names.size());
  for (std::size_t i = 0; i < longest; ++i) {
    for (std::size_t rank = 1; rank < names_by_rank.size(); ++rank) {
      const auto entry = [&](std::size_t r) {
        return i < names_by_rank[r].size() ? names_by_rank[r][i] : std::string("nothing more");
      };
      if (entry(rank) == entry(0)) continue;
      return concat("entry ", i + 1, ": rank 0 entered ", entry(0), ", rank ", rank, " entered ",
                    entry(rank));
    }
  }
  return "";
}

}  // namespace tessera::fsdp
