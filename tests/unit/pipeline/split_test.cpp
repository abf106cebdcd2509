// Layers on stages: none lost, none empty, and none better.
#include "pipeline/split.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "pipeline/kinds.h"
#include "tessera/error.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::pipeline::split_test {
namespace {

using ::testing::HasSubstr;

void expect_whole(const Split& split, int layers, int stages) {
  ASSERT_EQ(split.stages(), stages);
  int next = 0;
  for (int stage = 0; stage < stages; ++stage) {
    EXPECT_EQ(split.begin(stage), next) << "no layer is lost or doubled";
    const bool has_more = stage == 0 || stage + 1 == stages;
    EXPECT_GE(split.end(stage) - split.begin(stage), has_more ? 0 : 1);
    next = split.end(stage);
  }
  EXPECT_EQ(next, layers);
}

double largest_of_ranks(const Split& split, const LayerCosts& costs,
                        const std::vector<int>& rank_of) {
  std::vector<double> ranks(rank_of.size());
  const std::vector<double> stages = stage_costs(split, costs);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    ranks[static_cast<std::size_t>(rank_of[i])] += stages[i];
  }
  return std::ranges::max(ranks);
}

/// By trying all splits.
double smallest_of_ranks(const LayerCosts& costs, const std::vector<int>& rank_of) {
  const int layers = static_cast<int>(costs.layers.size());
  const int stages = static_cast<int>(rank_of.size());
  std::optional<double> smallest;
  Split split{layers, {}};
  const std::function<void(int)> place = [&](int from) {
    const int stage = split.stages();
    if (stage == stages) {
      for (int s = 0; s < stages; ++s) {
        if (split.end(s) - split.begin(s) < (s == 0 || s + 1 == stages ? 0 : 1)) return;
      }
      const double largest = largest_of_ranks(split, costs, rank_of);
      smallest = std::min(smallest.value_or(largest), largest);
      return;
    }
    for (int first = from; first <= (stage == 0 ? 0 : layers); ++first) {
      split.first_layer.push_back(first);
      place(first);
      split.first_layer.pop_back();
    }
  };
  place(0);
  return *smallest;
}

struct Case {
  LayerCosts costs;
  std::vector<int> rank_of;
};

Case draw(testing::Dice& dice, bool equal_layers) {
  const int ranks = 1 + dice.roll(3);
  const bool is_v = dice.chance(40);
  const int stages_per_rank = is_v ? 2 : 1 + dice.roll(2);
  Case one;
  one.rank_of = place_stages(is_v ? Placement::kV : Placement::kLoop, ranks, stages_per_rank);
  const int stages = ranks * stages_per_rank;
  const int layers = std::max(1, stages - 2) + dice.roll(8);
  for (int i = 0; i < layers; ++i) {
    one.costs.layers.push_back(equal_layers ? 4.0 : 1.0 + dice.roll(9));
  }
  one.costs.before = dice.roll(2) * dice.roll(8);
  one.costs.after = dice.roll(20);
  return one;
}

// Where all layers cost the same, or a rank has one stage, no split has a cheaper costliest rank.
TEST(Split, IsTheBestOfAllSplits) {
  int looked_at = 0;
  for (std::uint64_t seed = 1; seed <= 600; ++seed) {
    testing::Dice dice(seed);
    const bool equal_layers = dice.chance(60);
    const Case one = draw(dice, equal_layers);
    const Split split = split_by_cost(one.costs, one.rank_of);
    expect_whole(split, static_cast<int>(one.costs.layers.size()),
                 static_cast<int>(one.rank_of.size()));
    const bool one_stage_a_rank =
        static_cast<int>(one.rank_of.size()) == std::ranges::max(one.rank_of) + 1;
    if (!equal_layers && !one_stage_a_rank) continue;
    EXPECT_EQ(largest_of_ranks(split, one.costs, one.rank_of),
              smallest_of_ranks(one.costs, one.rank_of))
        << "seed " << seed << ": " << to_string(split);
    ++looked_at;
  }
  EXPECT_GT(looked_at, 300);
}

// Elsewhere it is never worse than the even split, and moving one layer does not help.
TEST(Split, OfUnequalLayersIsCloseToTheBest) {
  double worst = 1.0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    testing::Dice dice(seed);
    const Case one = draw(dice, false);
    const double found =
        largest_of_ranks(split_by_cost(one.costs, one.rank_of), one.costs, one.rank_of);
    worst = std::max(worst, found / smallest_of_ranks(one.costs, one.rank_of));
  }
  EXPECT_LE(worst, 1.25) << "of the best of all splits";
}

// The head of a large vocabulary weighs as much as many layers.
TEST(Split, CountsEmbeddingAndHead) {
  const LayerCosts costs{std::vector<double>(8, 1.0), 0.0, 4.0};
  EXPECT_EQ(to_string(split_by_cost(costs, {0, 1})),
            "stage 0: embedding, layers 0-5; stage 1: layers 6-7, head");
  EXPECT_EQ(stage_costs(split_by_cost(costs, {0, 1}), costs), (std::vector<double>{6.0, 6.0}));
  // On a V rank 0 has both ends.
  const Split v = split_by_cost(costs, {0, 1, 1, 0});
  EXPECT_EQ(v.end(2) - v.begin(1), 6) << to_string(v);
  const LayerCosts heavy{std::vector<double>(4, 1.0), 0.0, 9.0};
  EXPECT_EQ(to_string(split_by_cost(heavy, {0, 1})),
            "stage 0: embedding, layers 0-3; stage 1: head");
}

TEST(Split, OfEqualLayersIsEven) {
  const LayerCosts costs{std::vector<double>(8, 1.0), 0.0, 0.0};
  EXPECT_EQ(split_by_cost(costs, {0, 1, 2, 3}).first_layer, (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(split_by_cost(costs, {0}).first_layer, (std::vector<int>{0}));
  EXPECT_EQ(
      split_by_cost({std::vector<double>(32, 1.0), 0, 0}, {0, 1, 2, 3, 3, 2, 1, 0}).first_layer,
      (std::vector<int>{0, 4, 8, 12, 16, 20, 24, 28}));
}

// Two layers on four stages: embedding and head stand alone; one is too few.
TEST(Split, RefusesTooFewLayersWithNumbers) {
  const LayerCosts two{{1.0, 1.0}, 0.0, 1.0};
  EXPECT_EQ(to_string(split_by_cost(two, {0, 1, 1, 0})),
            "stage 0: embedding; stage 1: layer 0; stage 2: layer 1; stage 3: head");
  const LayerCosts one{{1.0}, 0.0, 1.0};
  try {
    split_by_cost(one, {0, 1, 1, 0});
    ADD_FAILURE() << "one layer on four stages";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(),
                HasSubstr("pipeline.split: found 1 layers for 4 stages, expected at least 2"));
  }
}

TEST(Split, AsGivenIsTakenOrRefused) {
  EXPECT_EQ(split_as_given({0, 1, 6}, 8, 3).first_layer, (std::vector<int>{0, 1, 6}));
  expect_whole(split_as_given({0, 0, 8}, 8, 3), 8, 3);
  for (const auto& [first, layers] : std::vector<std::pair<std::vector<int>, int>>{{{0, 4}, 8},
                                                                                   {{1, 4, 6}, 8},
                                                                                   {{0, 6, 4}, 8},
                                                                                   {{0, 4, 4}, 8},
                                                                                   {{0, 4, 9}, 8},
                                                                                   {{0, -1, 4}, 8},
                                                                                   {{}, 8}}) {
    EXPECT_THROW(split_as_given(first, layers, 3), Error);
  }
}

}  // namespace
}  // namespace tessera::pipeline::split_test
