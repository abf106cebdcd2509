// The search for a policy, on drawn tables of errors: roundings of groups add up as squares do, and
// each policy may be off that by some noise of its own.
#include "train/precision/precision_search.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <sstream>

#include "support/test.h"
#include "train/precision/precision_report.h"

namespace tessera::train::precision_search_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Stands in for a model.
struct Drawn {
  std::vector<ParameterErrors> parts;  ///< [G][P] of each group, where it is narrow
  std::vector<std::int64_t> costs;
  double bound = 0;
  double noise = 0;  ///< errors are up to this share off

  std::size_t groups() const { return parts.size(); }
  std::size_t parameters() const { return parts.front().size(); }

  ParameterErrors errors(const WideGroups& wide) const {
    ParameterErrors errors(parameters(), 0.0);
    if (std::ranges::count(wide, false) == 0) return errors;
    std::uint32_t seed = 0;
    for (const bool one : wide) seed = 2 * seed + (one ? 1 : 0);
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> off(-noise, noise);
    for (std::size_t p = 0; p < parameters(); ++p) {
      double sum = 0;
      for (std::size_t g = 0; g < groups(); ++g) {
        if (!wide[g]) sum += parts[g][p] * parts[g][p];
      }
      errors[p] = std::sqrt(sum) * (1.0 + off(random));
    }
    return errors;
  }

  PolicyProblem problem() const {
    ErrorTable table{.narrow = errors(WideGroups(groups(), false)),
                     .widened = {},
                     .narrowed = {},
                     .wide_noise = ParameterErrors(parameters(), 0.0),
                     .narrow_noise = ParameterErrors(parameters(), 0.0)};
    for (std::size_t g = 0; g < groups(); ++g) {
      WideGroups alone(groups(), false), others(groups(), true);
      alone[g] = true;
      others[g] = false;
      table.widened.push_back(errors(alone));
      table.narrowed.push_back(errors(others));
    }
    return {std::move(table), costs, bound};
  }

  std::int64_t cost(const WideGroups& wide) const {
    std::int64_t sum = 0;
    for (std::size_t g = 0; g < groups(); ++g) sum += wide[g] ? costs[g] : 0;
    return sum;
  }
};

std::string to_string(const Drawn& drawn) {
  std::ostringstream out;
  out << "bound " << drawn.bound << ", noise " << drawn.noise << "\n";
  for (std::size_t g = 0; g < drawn.groups(); ++g) {
    out << "  cost " << drawn.costs[g] << ":";
    for (const double part : drawn.parts[g]) out << ' ' << part;
    out << '\n';
  }
  return out.str();
}

/// The generator's own numbers are small in most cases: one seed draws all.
Drawn draw(double noise) {
  std::mt19937 random(*rc::gen::resize(rc::kNominalSize, rc::gen::arbitrary<std::uint32_t>()));
  const auto from = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  Drawn drawn;
  const int groups = from(1, 6), parameters = from(1, 5);
  for (int g = 0; g < groups; ++g) {
    drawn.parts.emplace_back();
    // A third of the groups does nothing to a parameter.
    for (int p = 0; p < parameters; ++p) {
      drawn.parts.back().push_back(std::max(0, from(-50, 100)) * 1e-3);
    }
    drawn.costs.push_back(from(0, 1000));
  }
  drawn.bound = from(1, 150) * 1e-3;
  drawn.noise = noise;
  RC_LOG() << to_string(drawn);
  return drawn;
}

double largest(const ParameterErrors& errors) { return std::ranges::max(errors); }

/// The result, and which policies were asked for.
struct Searched {
  FoundPolicy found;
  std::vector<WideGroups> measured;
};
Searched search(const Drawn& drawn) {
  Searched searched;
  searched.found = cheapest_policy(drawn.problem(), [&](const WideGroups& wide) {
    searched.measured.push_back(wide);
    return drawn.errors(wide);
  });
  return searched;
}

RC_GTEST_PROP(PrecisionSearch, ErrorsAreMeasuredAndWithinTheBoundAndNoGroupCanBeNarrowed, ()) {
  const auto drawn = draw(*rc::gen::element(0.0, 0.1, 0.5));
  const auto [found, measured] = search(drawn);
  RC_ASSERT(found.errors == drawn.errors(found.wide));
  RC_ASSERT(largest(found.errors) <= drawn.bound);
  std::size_t wide = 0;
  for (std::size_t g = 0; g < drawn.groups(); ++g) {
    if (!found.wide[g]) continue;
    auto without = found.wide;
    without[g] = false;
    RC_ASSERT(largest(drawn.errors(without)) > drawn.bound);
    RC_ASSERT(found.needed.at(wide).group == g);
    RC_ASSERT(found.needed[wide].without.error == largest(drawn.errors(without)));
    ++wide;
  }
  RC_ASSERT(found.needed.size() == wide);
}

RC_GTEST_PROP(PrecisionSearch, NothingIsMeasuredTwiceOrThoughTheTableHasIt, ()) {
  const auto drawn = draw(*rc::gen::element(0.0, 0.3));
  const auto [found, measured] = search(drawn);
  std::set<WideGroups> seen;
  for (const auto& wide : measured) {
    const auto count = static_cast<std::size_t>(std::ranges::count(wide, true));
    RC_ASSERT(count > 1 && count + 1 < drawn.groups());
    RC_ASSERT(seen.insert(wide).second);
  }
  if (largest(drawn.errors(WideGroups(drawn.groups(), false))) <= drawn.bound) {
    RC_ASSERT(std::ranges::count(found.wide, true) == 0 && measured.empty());
  }
}

// A group that rounds nothing is never wide, however cheap it is.
RC_GTEST_PROP(PrecisionSearch, GroupsWithoutAnEffectStayNarrow, ()) {
  auto drawn = draw(0.0);
  drawn.parts.emplace_back(drawn.parameters(), 0.0);
  drawn.costs.push_back(0);
  RC_ASSERT(!search(drawn).found.wide.back());
}

// A parameter that is not held counts nowhere: the result is that of the table without it.
RC_GTEST_PROP(PrecisionSearch, ParametersWhoseReferenceIsNoiseDoNotCount, ()) {
  const auto drawn = draw(0.0);
  auto problem = drawn.problem();
  const auto lost = drawn.parameters() - 1;
  problem.table.wide_noise[lost] = 2 * drawn.bound;
  auto rest = drawn;
  for (auto& parts : rest.parts) parts[lost] = 0.0;
  const auto found =
      cheapest_policy(problem, [&](const WideGroups& wide) { return drawn.errors(wide); });
  RC_ASSERT(found.wide == search(rest).found.wide);
}

// In most of 500 drawn problems the cost is that of the best of all policies, and in the mean
// little above it: the search sees a few policies, the proof all.
TEST(PrecisionSearch, IsRarelyDearerThanTheBestOfAllPolicies) {
  std::mt19937 random(44);
  std::uniform_int_distribution<int> part(-50, 100), cost(1, 1000), bound(10, 150);
  int best = 0;
  double ratios = 0;
  constexpr int kProblems = 500;
  for (int i = 0; i < kProblems; ++i) {
    Drawn drawn;
    for (int g = 0; g < 6; ++g) {
      drawn.parts.emplace_back();
      for (int p = 0; p < 8; ++p) drawn.parts.back().push_back(std::max(0, part(random)) * 1e-3);
      drawn.costs.push_back(cost(random));
    }
    drawn.bound = bound(random) * 1e-3;
    const std::int64_t found = drawn.cost(search(drawn).found.wide);
    std::int64_t least = found;
    for (unsigned bits = 0; bits < 64; ++bits) {
      WideGroups wide;
      for (unsigned g = 0; g < 6; ++g) wide.push_back((bits >> g) % 2 == 1);
      if (largest(drawn.errors(wide)) <= drawn.bound) least = std::min(least, drawn.cost(wide));
    }
    best += found == least ? 1 : 0;
    ratios += least == 0 ? 1.0 : static_cast<double>(found) / static_cast<double>(least);
  }
  RecordProperty("best", best);
  EXPECT_GE(best, kProblems * 8 / 10);
  EXPECT_LE(ratios / kProblems, 1.05);
}

// Naive: an effect within noise is taken for one, and its group, the cheapest, is widened first.
TEST(PrecisionSearch, AnEffectWithinNoiseIsNotRecommendedWhereAnotherGroupIsEnough) {
  PolicyProblem problem{.table = {.narrow = {0.0505},
                                  .widened = {{0.0499}, {0.01}, {0.0515}},
                                  .narrowed = {{0.001}, {0.05}, {0.001}},
                                  .wide_noise = {1e-7},
                                  .narrow_noise = {1e-5}},
                        .costs = {1, 100, 1},
                        .bound = 0.05};
  const auto found = cheapest_policy(problem, [](const WideGroups&) { return ParameterErrors{1}; });
  EXPECT_EQ(found.wide, (WideGroups{false, true, false}));
  EXPECT_FALSE(problem.table.widened[0][0] > problem.bound);  // it would have been enough
  EXPECT_EQ(noise_of(problem.table).at(0), 0.0515 - 0.0505);
}

TEST(PrecisionSearch, ErrorsThatAreNotFiniteAreAboveAnyBound) {
  PolicyProblem problem{.table = {.narrow = {kInfinity, 0.01},
                                  .widened = {{kInfinity, 0.01}, {0.02, 0.01}},
                                  .narrowed = {{0.02, 0.01}, {kInfinity, 0.01}},
                                  .wide_noise = {0, 0},
                                  .narrow_noise = {std::nan(""), 0}},
                        .costs = {1, 1},
                        .bound = 0.05};
  const auto none = [](const WideGroups&) -> ParameterErrors { throw std::logic_error("asked"); };
  EXPECT_EQ(cheapest_policy(problem, none).wide, (WideGroups{false, true}));
  problem.bound = 0.015;
  const auto found = cheapest_policy(problem, none);
  EXPECT_TRUE(found.is_all_wide());
  EXPECT_EQ(found.errors, (ParameterErrors{0, 0}));
}

RC_GTEST_PROP(PrecisionSearch, WiresAreNarrowWhereEveryGradientOfTheGroupStaysWithinTheBound, ()) {
  std::mt19937 random(*rc::gen::resize(rc::kNominalSize, rc::gen::arbitrary<std::uint32_t>()));
  std::uniform_int_distribution<int> thousandths(0, 100), any(0, 2);
  const auto parameters = static_cast<std::size_t>(1 + thousandths(random) % 7);
  ParameterErrors errors, wire;
  std::vector<std::vector<std::size_t>> groups(3);
  std::vector<bool> held;
  for (std::size_t p = 0; p < parameters; ++p) {
    errors.push_back(thousandths(random) * 1e-3);
    wire.push_back(thousandths(random) * 1e-3);
    groups[static_cast<std::size_t>(any(random))].push_back(p);
    held.push_back(any(random) > 0);
  }
  const double bound = (1 + thousandths(random)) * 1e-3;
  const auto narrow = narrow_wires(errors, wire, groups, held, bound);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool is_above = std::ranges::any_of(groups[g], [&](std::size_t p) {
      return held[p] && std::hypot(errors[p], wire[p]) > bound * (1 + 1e-12);
    });
    const bool is_below = std::ranges::all_of(groups[g], [&](std::size_t p) {
      return !held[p] || std::hypot(errors[p], wire[p]) < bound * (1 - 1e-12);
    });
    if (is_above) RC_ASSERT(!narrow[g]);
    if (is_below) RC_ASSERT(narrow[g]);
  }
}

// Naive: a group whose activations were not counted has none, and is the cheapest of all.
RC_GTEST_PROP(GroupCosts, ActivationsCountOfAllGroupsOrOfNone, ()) {
  const auto groups = *rc::gen::inRange<std::size_t>(1, 6);
  const auto unknown = *rc::gen::inRange<std::size_t>(0, groups + 2);  // the last: all are known
  const auto counted = [&](std::size_t which, std::int64_t parameters) {
    PolicyCost cost{.unsharded_bytes = parameters};
    if (which != unknown) cost.activation_bytes = *rc::gen::inRange<std::int64_t>(100, 200);
    return cost;
  };
  const PolicyCost narrow = counted(groups, 1000);
  std::vector<PolicyCost> alone;
  for (std::size_t g = 0; g < groups; ++g) {
    alone.push_back(counted(g, 1000 + *rc::gen::inRange<std::int64_t>(0, 1000)));
  }
  const GroupCosts costs = group_costs(narrow, alone);
  RC_ASSERT(costs.bytes.size() == groups);
  RC_ASSERT(costs.have_activations == (unknown > groups));
  for (std::size_t g = 0; g < groups; ++g) {
    std::int64_t expected = alone[g].unsharded_bytes - 1000;
    if (unknown > groups && *alone[g].activation_bytes > *narrow.activation_bytes) {
      expected += *alone[g].activation_bytes - *narrow.activation_bytes;
    }
    RC_ASSERT(costs.bytes[g] == expected);
  }
}

}  // namespace
}  // namespace tessera::train::precision_search_test
