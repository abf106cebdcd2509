// Property: for any lifetimes, buffers of a plan lie where they may, in a block that is no larger
// than all of them and no smaller than those that live at one time; a wrong place is found.
#include "capture/replay/arena_plan.h"

#include <random>

#include "support/test.h"

namespace tessera::capture::arena_plan_test {
namespace {

using ::testing::SizeIs;

constexpr unsigned kCases = 400;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

bool meet(const Lifetime& a, const Lifetime& b) { return a.first <= b.last && b.first <= a.last; }

/// Few or many, all alive at once or each alone, of sizes from nothing to some pages.
std::vector<Lifetime> drawn(std::mt19937& random) {
  const auto below = [&](std::int64_t count) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(count));
  };
  const std::int64_t count = below(24), steps = 1 + below(30), longest = 1 + below(steps);
  const std::int64_t largest = std::int64_t{1} << below(14);
  std::vector<Lifetime> all;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t first = below(steps);
    all.push_back({below(largest + 1), first, first + below(longest)});
  }
  return all;
}

/// The most bytes that live at one step.
std::int64_t peak_of(const std::vector<Lifetime>& lifetimes) {
  std::int64_t peak = 0;
  for (const auto& at : lifetimes) {
    std::int64_t bytes = 0;
    for (const auto& each : lifetimes) {
      if (each.first <= at.first && at.first <= each.last) bytes += each.bytes;
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

// Naive: two buffers of which one begins in the step in which the other ends, in the same bytes.
TEST(ArenaPlan, DrawnLifetimesLieWhereTheyMay) {
  std::mt19937 random(20260);
  for (unsigned i = 0; i < kCases; ++i) {
    SCOPED_TRACE(concat("case ", i));
    const auto lifetimes = drawn(random);
    const auto plan = plan_arena(lifetimes);
    EXPECT_THAT(faults_of(plan, lifetimes), IsEmpty());
    std::int64_t sum = 0;
    for (const auto& each : lifetimes) sum += aligned(each.bytes);
    EXPECT_GE(plan.bytes, peak_of(lifetimes));
    EXPECT_LE(plan.bytes, sum);
    // Not by faults_of() alone, which may be wrong as plan_arena() is.
    for (std::size_t a = 0; a < lifetimes.size(); ++a) {
      EXPECT_EQ(plan.offsets[a] % kArenaAlignment, 0);
      EXPECT_LE(plan.offsets[a] + lifetimes[a].bytes, plan.bytes);
      for (std::size_t b = 0; b < a; ++b) {
        if (!meet(lifetimes[a], lifetimes[b])) continue;
        EXPECT_TRUE(plan.offsets[a] + lifetimes[a].bytes <= plan.offsets[b] ||
                    plan.offsets[b] + lifetimes[b].bytes <= plan.offsets[a] ||
                    lifetimes[a].bytes == 0 || lifetimes[b].bytes == 0)
            << a << " and " << b;
      }
    }
  }
}

TEST(ArenaPlan, TheSameLifetimesGiveTheSamePlan) {
  std::mt19937 random(20261);
  for (unsigned i = 0; i < kCases; ++i) {
    const auto lifetimes = drawn(random);
    const auto one = plan_arena(lifetimes), other = plan_arena(lifetimes);
    EXPECT_EQ(one.offsets, other.offsets);
    EXPECT_EQ(one.bytes, other.bytes);
  }
}

// Naive: first fit in the order of steps, in which nothing is ever used again.
TEST(ArenaPlan, WhatLivesOneAfterTheOtherLiesInTheSameBytes) {
  const std::vector<Lifetime> lifetimes{{100, 0, 1}, {128, 2, 3}, {1, 4, 4}};
  EXPECT_EQ(plan_arena(lifetimes).bytes, 128);
  const std::vector<Lifetime> at_once{{100, 0, 1}, {128, 1, 3}, {1, 3, 4}};
  EXPECT_EQ(plan_arena(at_once).bytes, 256);
}

// Seeded faults, one at a time in a plan without any. Naive: a check of neighbours alone.
TEST(ArenaPlan, EachFaultIsFound) {
  std::mt19937 random(20262);
  int moved = 0, turned = 0, outside = 0;
  for (unsigned i = 0; i < kCases; ++i) {
    SCOPED_TRACE(concat("case ", i));
    const auto lifetimes = drawn(random);
    if (lifetimes.empty()) continue;
    const auto plan = plan_arena(lifetimes);
    const auto at = random() % lifetimes.size(), other = random() % lifetimes.size();
    if (at != other && meet(lifetimes[at], lifetimes[other]) && lifetimes[at].bytes > 0 &&
        lifetimes[other].bytes > 0) {
      auto faulty = plan;
      faulty.offsets[at] = plan.offsets[other];
      const auto both = concat("buffers ", std::min(at, other), " and ", std::max(at, other));
      EXPECT_THAT(faults_of(faulty, lifetimes), Contains(Says(both)));
      ++moved;
    }
    const auto named = concat("buffer ", at, ": found bytes");
    {
      auto faulty = plan;
      faulty.offsets[at] += 1 + static_cast<std::int64_t>(random() % (kArenaAlignment - 1));
      EXPECT_THAT(faults_of(faulty, lifetimes), Contains(Says(named)));
      ++turned;
    }
    for (const std::int64_t begin : {-kArenaAlignment, aligned(plan.bytes)}) {
      auto faulty = plan;
      faulty.offsets[at] = begin;
      if (begin >= 0 && lifetimes[at].bytes == 0) continue;  // nothing of it lies outside
      EXPECT_THAT(faults_of(faulty, lifetimes), Contains(Says(named)));
      ++outside;
    }
    auto faulty = plan;
    faulty.offsets.pop_back();
    EXPECT_THAT(faults_of(faulty, lifetimes), SizeIs(1));
  }
  EXPECT_GT(moved, 50);
  EXPECT_GT(turned, 200);
  EXPECT_GT(outside, 200);
}

}  // namespace
}  // namespace tessera::capture::arena_plan_test
