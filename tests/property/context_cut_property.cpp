// Cuts of a row over random numbers of ranks, parts and positions, and random work of the parts:
// every position has one owner, ranks have equally many, and the work is spread within a bound.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "layout/context_cut.h"
#include "support/test.h"

namespace tessera::layout::context_cut_property {
namespace {

/// Whole numbers, which doubles add exactly.
using Work = std::vector<double>;

Work draw_work(int parts) {
  const auto most = *rc::gen::element<std::int64_t>(1, 5, 1000, std::int64_t{1} << 40);
  Work work;
  for (int i = 0; i < parts; ++i) {
    work.push_back(static_cast<double>(*rc::gen::inRange<std::int64_t>(0, most + 1)));
  }
  return work;
}

ContextCut draw_cut() {
  const int ranks = *rc::gen::inRange(1, 9);
  const auto size = *rc::gen::element<std::int64_t>(0, 1, 2, 7, 64);
  if (*rc::gen::arbitrary<bool>()) {
    const int parts = 2 * ranks * *rc::gen::inRange(1, 5);
    return head_tail(size * parts, ranks, parts);
  }
  const int parts = ranks * *rc::gen::inRange(1, 9);
  return by_work(size * parts, ranks, draw_work(parts));
}

Work loads_of(const ContextCut& cut, const Work& work) {
  Work loads(static_cast<std::size_t>(cut.ranks), 0.0);
  for (std::size_t part = 0; part < work.size(); ++part) {
    loads.at(static_cast<std::size_t>(cut.owner.at(part))) += work[part];
  }
  return loads;
}

double largest_of(const Work& loads) { return *std::ranges::max_element(loads); }

/// The least of the largest loads over all cuts with equally many parts a rank, by trying each.
double best_of(const Work& work, std::size_t next, Work& loads, std::vector<int>& room) {
  if (next == work.size()) return largest_of(loads);
  double best = std::numeric_limits<double>::infinity();
  for (std::size_t rank = 0; rank < loads.size(); ++rank) {
    if (room[rank] == 0) continue;
    const double before = loads[rank];
    loads[rank] += work[next];
    --room[rank];
    best = std::min(best, best_of(work, next + 1, loads, room));
    ++room[rank];
    loads[rank] = before;
  }
  return best;
}
double best_of(const Work& work, int ranks) {
  Work loads(static_cast<std::size_t>(ranks), 0.0);
  std::vector<int> room(loads.size(), static_cast<int>(work.size()) / ranks);
  return best_of(work, 0, loads, room);
}

/// Returns the largest part's work less the smallest's.
double spread_of(const Work& work) {
  const auto [least, most] = std::ranges::minmax_element(work);
  return *most - *least;
}

RC_GTEST_PROP(ContextCutProperty, EveryPositionHasOneOwnerAndRanksHaveEquallyMany, ()) {
  const ContextCut cut = draw_cut();
  std::vector<int> owners(static_cast<std::size_t>(cut.positions), -1);
  for (int rank = 0; rank < cut.ranks; ++rank) {
    const auto places = cut.places_of(rank);
    RC_ASSERT(std::cmp_equal(places.size(), cut.positions_of_rank()));
    RC_ASSERT(std::ranges::adjacent_find(places, std::greater_equal<>()) == places.end());
    for (const std::int64_t place : places) {
      int& owner = owners.at(static_cast<std::size_t>(place));
      RC_ASSERT(owner == -1);
      owner = rank;
      RC_ASSERT(cut.owner.at(static_cast<std::size_t>(place / cut.part_size())) == rank);
    }
  }
  RC_ASSERT(std::ranges::count(owners, -1) == 0);
}

RC_GTEST_PROP(ContextCutProperty, RunsAreThePlacesWithNeighboursJoined, ()) {
  const ContextCut cut = draw_cut();
  for (int rank = 0; rank < cut.ranks; ++rank) {
    std::vector<std::int64_t> places;
    const auto runs = cut.runs_of(rank);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      RC_ASSERT(i == 0 || runs[i - 1].end < runs[i].begin);
      RC_ASSERT(runs[i].empty() == (cut.positions == 0));
      for (std::int64_t place = runs[i].begin; place < runs[i].end; ++place) {
        places.push_back(place);
      }
    }
    RC_ASSERT(places == cut.places_of(rank));
  }
}

// A gather over ranks gives rows rank by rank: written to their places they are the whole row.
RC_GTEST_PROP(ContextCutProperty, GatheredRowsWrittenToTheirPlacesAreTheRow, ()) {
  const ContextCut cut = draw_cut();
  std::vector<std::int64_t> row(static_cast<std::size_t>(cut.positions));
  for (auto& value : row) value = *rc::gen::inRange<std::int64_t>(0, 1000);
  std::vector<std::int64_t> gathered, places, again(row.size(), -1);
  for (int rank = 0; rank < cut.ranks; ++rank) {
    for (const std::int64_t place : cut.places_of(rank)) {
      gathered.push_back(row.at(static_cast<std::size_t>(place)));
      places.push_back(place);
    }
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    again.at(static_cast<std::size_t>(places[i])) = gathered[i];
  }
  RC_ASSERT(again == row);
}

RC_GTEST_PROP(ContextCutProperty, HeadTailSharesACausalMaskExactly, ()) {
  const int ranks = *rc::gen::inRange(1, 17);
  const int parts = 2 * ranks * *rc::gen::inRange(1, 5);
  const auto size = *rc::gen::inRange<std::int64_t>(1, 100);
  const ContextCut cut = head_tail(size * parts, ranks, parts);
  std::vector<std::int64_t> pairs;
  for (int rank = 0; rank < ranks; ++rank) {
    pairs.push_back(0);
    for (const std::int64_t place : cut.places_of(rank)) pairs.back() += place + 1;
  }
  RC_ASSERT(std::ranges::count(pairs, pairs.front()) == ranks);
  RC_ASSERT(std::ssize(cut.runs_of(0)) == (ranks == 1 ? 1 : 2));
}

// The bound that context_cut.h states.
RC_GTEST_PROP(ContextCutProperty, WorkOfRanksDiffersByLessThanThatOfParts, ()) {
  const int ranks = *rc::gen::inRange(1, 17);
  const int parts = ranks * *rc::gen::inRange(1, 17);
  const Work work = draw_work(parts);
  const ContextCut cut = by_work(parts, ranks, work);
  RC_ASSERT(spread_of(loads_of(cut, work)) <= spread_of(work));
}

// That bound to the mean, which no cut is below; none is missed where a rank has two parts.
RC_GTEST_PROP(ContextCutProperty, ByWorkIsNearTheBestOfAllCuts, ()) {
  const int ranks = *rc::gen::inRange(2, 5);
  const int each = *rc::gen::inRange(1, ranks == 2 ? 5 : ranks == 3 ? 4 : 3);
  const Work work = draw_work(ranks * each);
  const double found = largest_of(loads_of(by_work(ranks * each, ranks, work), work));
  const double best = best_of(work, ranks);
  RC_ASSERT(found >= best);
  RC_ASSERT(found <= best + spread_of(work) * (ranks - 1) / ranks);
  if (each <= 2) RC_ASSERT(found == best);
}

RC_GTEST_PROP(ContextCutProperty, NoExchangeOfTwoPartsWouldLowerTheLargestLoad, ()) {
  const int ranks = *rc::gen::inRange(2, 9);
  const int parts = ranks * *rc::gen::inRange(1, 9);
  const Work work = draw_work(parts);
  ContextCut cut = by_work(parts, ranks, work);
  const Work loads = loads_of(cut, work);
  const auto most = std::ranges::max_element(loads) - loads.begin();
  for (std::size_t own = 0; own < work.size(); ++own) {
    for (std::size_t other = 0; other < work.size(); ++other) {
      if (cut.owner[own] != most || cut.owner[other] == most) continue;
      std::swap(cut.owner[own], cut.owner[other]);
      const Work after = loads_of(cut, work);
      std::swap(cut.owner[own], cut.owner[other]);
      const auto rank = static_cast<std::size_t>(cut.owner[other]);
      RC_ASSERT(std::max(after.at(static_cast<std::size_t>(most)), after.at(rank)) >=
                largest_of(loads));
    }
  }
}

// Every rank computes the cut itself: it depends on nothing but the order of the numbers.
RC_GTEST_PROP(ContextCutProperty, CutsAreFunctionsOfTheWorkAlone, ()) {
  const int ranks = *rc::gen::inRange(1, 9);
  const int parts = ranks * *rc::gen::inRange(1, 9);
  Work work = draw_work(parts);
  const ContextCut cut = by_work(parts, ranks, work);
  RC_ASSERT(by_work(parts, ranks, Work(work)) == cut);
  for (double& each : work) each *= 1.0 / 1024;  // exact
  const ContextCut scaled = by_work(parts, ranks, work);
  RC_ASSERT(scaled == cut && hash(scaled) == hash(cut) && to_string(scaled) == to_string(cut));
}

RC_GTEST_PROP(ContextCutProperty, CutsAreEqualWhereTheirHashesAre, ()) {
  const ContextCut one = draw_cut(), other = draw_cut();
  RC_ASSERT((one == other) == (hash(one) == hash(other)));
}

// The lengths that a refusal names go, and no length between them does.
RC_GTEST_PROP(ContextCutProperty, RefusalsNameTheNearestLengths, ()) {
  const int ranks = *rc::gen::inRange(1, 9);
  const int parts = 2 * ranks * *rc::gen::inRange(1, 5);
  const auto positions = *rc::gen::inRange<std::int64_t>(1, 300);
  const auto goes = [&](std::int64_t length) {
    return refusal_of([&] { check_cut(length, ranks, parts); }).empty();
  };
  std::int64_t below = positions, above = positions;
  while (below > 0 && !goes(below)) --below;
  while (!goes(above)) ++above;
  const std::string says = refusal_of([&] { check_cut(positions, ranks, parts); });
  if (below == above) {
    RC_ASSERT(says.empty());
  } else if (below == 0) {
    RC_ASSERT(says.ends_with(concat("; take ", above)));
  } else {
    RC_ASSERT(says.ends_with(concat("; take ", below, " or ", above)));
  }
}

}  // namespace
}  // namespace tessera::layout::context_cut_property
