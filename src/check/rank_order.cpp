#include "check/rank_order.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/error.h"

namespace tessera::check {
namespace {

std::string name_of(const NotedRank& rank) {
  return concat("rank ", rank.rank, " (", rank.place, ")");
}

std::set<std::string> groups_of(const NotedRank& rank) {
  std::set<std::string> groups;
  for (const auto& one : rank.collectives) groups.insert(one.group);
  return groups;
}

/// Returns what it issues in these groups.
std::vector<const NotedCollective*> issued_in(const NotedRank& rank,
                                              const std::set<std::string>& groups) {
  std::vector<const NotedCollective*> issued;
  for (const auto& one : rank.collectives) {
    if (groups.contains(one.group)) issued.push_back(&one);
  }
  return issued;
}

void compare_collectives(const NotedRank& a, const NotedRank& b, std::vector<Finding>& findings) {
  std::set<std::string> shared;
  std::ranges::set_intersection(groups_of(a), groups_of(b), std::inserter(shared, shared.end()));
  const auto of_a = issued_in(a, shared), of_b = issued_in(b, shared);
  for (std::size_t i = 0; i < std::max(of_a.size(), of_b.size()); ++i) {
    const auto* one = i < of_a.size() ? of_a[i] : nullptr;
    const auto* other = i < of_b.size() ? of_b[i] : nullptr;
    const bool same = one != nullptr && other != nullptr && one->group == other->group &&
                      one->fingerprint == other->fingerprint && one->unit == other->unit;
    if (same) continue;
    const auto words = [](const NotedCollective* which) {
      return which == nullptr ? std::string("nothing more")
                              : concat(which->words, ", ", which->group);
    };
    findings.push_back({.kind = FindingKind::kOrder,
                        .operation = words(one != nullptr ? one : other),
                        .unit = (one != nullptr ? one : other)->unit,
                        .found = concat(name_of(a), " in ", words(one), " where ", name_of(b),
                                        " is in ", words(other), ": each would wait for the other"),
                        .expected = "the same collectives in the same order on both",
                        .mend = kMendOfOrder});
    return;
  }
}

/// By words and bytes, how many.
std::map<std::pair<std::string, std::int64_t>, int> messages_of(const NotedRank& rank, bool sends,
                                                                int peer) {
  std::map<std::pair<std::string, std::int64_t>, int> count;
  for (const auto& one : rank.messages) {
    if (one.sends == sends && one.peer == peer) ++count[{one.words, one.bytes}];
  }
  return count;
}

void compare_messages(const NotedRank& from, const NotedRank& to, std::vector<Finding>& findings) {
  const auto sent = messages_of(from, true, to.rank);
  const auto received = messages_of(to, false, from.rank);
  if (sent == received) return;
  const auto only_in = [](const auto& one, const auto& other) {
    for (const auto& [message, count] : one) {
      const auto found = other.find(message);
      if (found == other.end() || found->second < count) {
        return concat(message.first, " (", message.second, " bytes)");
      }
    }
    return std::string("nothing else");
  };
  findings.push_back(
      {.kind = FindingKind::kOrder,
       .operation = only_in(sent, received),
       .axis = "pp",
       .found = concat(name_of(from), " sends ", only_in(sent, received), ", and ", name_of(to),
                       " waits for ", only_in(received, sent)),
       .expected = "a receive for each send, of the same bytes",
       .mend = "look at the schedule (tessera schedule) and at the borders of stages"});
}

}  // namespace

std::vector<Finding> wrong_order(std::span<const NotedRank> ranks) {
  std::vector<Finding> findings;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (std::size_t j = i + 1; j < ranks.size(); ++j) {
      compare_collectives(ranks[i], ranks[j], findings);
      compare_messages(ranks[i], ranks[j], findings);
      compare_messages(ranks[j], ranks[i], findings);
    }
  }
  return findings;
}

}  // namespace tessera::check
