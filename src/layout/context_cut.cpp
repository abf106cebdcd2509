#include "layout/context_cut.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::layout {

std::vector<int> ContextCut::parts_of(int rank) const {
  std::vector<int> found;
  for (int number = 0; number < parts(); ++number) {
    if (owner[static_cast<std::size_t>(number)] == rank) found.push_back(number);
  }
  return found;
}

std::vector<Range> ContextCut::runs_of(int rank) const {
  std::vector<Range> runs;
  for (const int number : parts_of(rank)) {
    const Range next = part(number);
    if (!runs.empty() && runs.back().end == next.begin) {
      runs.back().end = next.end;
    } else {
      runs.push_back(next);
    }
  }
  return runs;
}

std::vector<std::int64_t> ContextCut::places_of(int rank) const {
  std::vector<std::int64_t> places;
  for (const Range& run : runs_of(rank)) {
    for (std::int64_t place = run.begin; place < run.end; ++place) places.push_back(place);
  }
  return places;
}

void check_parts(int ranks, int parts) {
  const std::int64_t halves = 2 * std::int64_t{ranks};
  // Attention computes part by part, and each part's addends meet those of all others.
  const std::int64_t most = std::max(std::int64_t{1024}, 4 * halves);
  TESSERA_CHECK(
      parts >= 1 && parts <= most && (ranks == 1 || parts % halves == 0), ErrorKind::kConfig,
      "parallelism.context_parallel_parts: found ", parts, ", expected ",
      parts > most
          ? concat("at most ", most)
          : concat("a multiple of ", halves,
                   ", a head and a tail of a row for each of context_parallel_degree = ", ranks,
                   " ranks"),
      "; change it, or leave it out");
}

void check_cut(std::int64_t positions, int ranks, int parts) {
  TESSERA_CHECK(parts >= 1 && parts % ranks == 0, ErrorKind::kConfig, "a cut of rows: found ",
                parts, " parts, expected a multiple of the ", ranks,
                " ranks of parallelism.context_parallel_degree");
  const std::int64_t below = positions / parts * parts;
  TESSERA_CHECK(positions % parts == 0, ErrorKind::kConfig, "context parallelism: found rows of ",
                positions, " positions, expected a multiple of ", parts, ", the parts that ", ranks,
                " ranks share (parallelism.context_parallel_parts); ",
                below > 0 ? concat("take ", below, " or ") : std::string("take "), below + parts);
}

ContextCut head_tail(std::int64_t positions, int ranks, int parts) {
  check_cut(positions, ranks, parts);
  check_parts(ranks, parts);
  ContextCut cut{.ranks = ranks, .positions = positions, .owner = {}};
  for (int number = 0; number < parts; ++number) {
    const int half = static_cast<int>(std::int64_t{number} * 2 * ranks / parts);  // of 2 * ranks
    cut.owner.push_back(std::min(half, 2 * ranks - 1 - half));
  }
  return cut;
}

namespace {

using Loads = std::vector<double>;  ///< one a rank

std::size_t index(int number) { return static_cast<std::size_t>(number); }

/// Gives the largest part first, each to the least loaded rank that has room.
Loads deal(ContextCut& cut, std::span<const double> work) {
  // Two ranks r and f: take the last i such that r got its i-th part while f had fewer than i, so
  // that r was the less loaded one. That part is all by which r passes f's first i; each later part
  // of r came after f's part of the same number and is no larger.
  std::vector<int> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](int a, int b) {
    return std::pair(-work[index(a)], a) < std::pair(-work[index(b)], b);
  });
  Loads load(index(cut.ranks), 0.0);
  std::vector<int> room(index(cut.ranks), cut.parts() / cut.ranks);
  for (const int number : order) {
    std::size_t least = load.size();
    for (std::size_t rank = 0; rank < load.size(); ++rank) {
      if (room[rank] > 0 && (least == load.size() || load[rank] < load[least])) least = rank;
    }
    cut.owner[index(number)] = static_cast<int>(least);
    load[least] += work[index(number)];
    --room[least];
  }
  return load;
}

struct Exchange {
  double larger = 0.0;  ///< the larger load of the two ranks after it
  std::size_t given = 0, taken = 0;
};

/// Returns the best exchange of a part of the most loaded rank; none where its load would not fall.
std::optional<Exchange> best_exchange(const ContextCut& cut, std::span<const double> work,
                                      const Loads& load) {
  const int most = static_cast<int>(std::ranges::max_element(load) - load.begin());
  Exchange best{load[index(most)]};
  for (std::size_t given = 0; given < work.size(); ++given) {
    if (cut.owner[given] != most) continue;
    for (std::size_t taken = 0; taken < work.size(); ++taken) {
      if (cut.owner[taken] == most) continue;
      const double less = work[given] - work[taken];
      const double larger =
          std::max(load[index(most)] - less, load[index(cut.owner[taken])] + less);
      if (larger < best.larger) best = {larger, given, taken};
    }
  }
  return best.larger < load[index(most)] ? std::optional(best) : std::nullopt;
}

}  // namespace

ContextCut by_work(std::int64_t positions, int ranks, std::span<const double> work) {
  check_cut(positions, ranks, static_cast<int>(work.size()));
  for (std::size_t part = 0; part < work.size(); ++part) {
    TESSERA_CHECK(std::isfinite(work[part]) && work[part] >= 0.0, ErrorKind::kConfig,
                  "a cut of rows: found work ", work[part], " of part ", part,
                  ", expected a finite amount that is not negative");
  }
  ContextCut cut{.ranks = ranks, .positions = positions, .owner = std::vector<int>(work.size())};
  Loads load = deal(cut, work);
  // Both loads of an exchange are below the largest one, so that this comes to an end, and above
  // the smaller one of the two, so that ranks come no further apart.
  while (const auto exchange = best_exchange(cut, work, load)) {
    const auto& [larger, given, taken] = *exchange;
    const double less = work[given] - work[taken];
    load[index(cut.owner[given])] -= less;
    load[index(cut.owner[taken])] += less;
    std::swap(cut.owner[given], cut.owner[taken]);
  }
  return cut;
}

std::string to_string(const ContextCut& cut) {
  std::string text =
      concat(cut.parts(), cut.parts() == 1 ? " part of " : " parts of ", cut.part_size(), " over ",
             cut.ranks, cut.ranks == 1 ? " rank:" : " ranks:");
  for (const int rank : cut.owner) text += concat(" ", rank);
  return text;
}

std::uint64_t hash(const ContextCut& cut) {
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(cut.ranks)).add(static_cast<std::uint64_t>(cut.positions));
  for (const int rank : cut.owner) hasher.add(static_cast<std::uint64_t>(rank));
  return hasher.digest();
}

}  // namespace tessera::layout
