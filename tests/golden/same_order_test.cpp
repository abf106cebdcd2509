// Layouts that form the same sums of the same addends in the same order have the same bits.
//
// [Note: sums of layouts] Of two addends the order does not matter. What differs between other
// layouts is which rows a product adds: a rank's own ones, then ranks.
#include <gtest/gtest.h>

#include "golden/degrees.h"

namespace tessera::golden {
namespace {

class SameOrder : public ::testing::TestWithParam<std::string> {
 protected:
  Gradients run(const Degrees& degrees, Layout layout = {}) const {
    layout.ranks = degrees.ranks();
    layout.replicas = degrees.replicate;
    auto config = config_for(GetParam(), degrees);
    config.parallelism.reshard_after_forward = layout.reshard_after_forward;
    return run_gradients(config, layout, Reference::of(GetParam()).batches());
  }
};

const Degrees kLayouts[] = {{.tp = 2},
                            {.tp = 2, .sequence = false},
                            {.tp = 2, .etp = 2},
                            {.shard = 2, .ep = 2},
                            {.tp = 2, .ep = 2},
                            {.tp = 2, .ep = 2, .router = models::RouterTokens::kAll},
                            {.shard = 2, .tp = 2, .ep = 2},
                            {.shard = 2, .tp = 2, .ep = 2, .etp = 2},
                            {.shard = 2, .tp = 2, .ep = 4}};

TEST_P(SameOrder, ReshardingAfterForwardChangesNoBit) {
  for (const Degrees& degrees : kLayouts) {
    SCOPED_TRACE(to_string(degrees));
    expect_same_bits(run(degrees, {.reshard_after_forward = false}), run(degrees));
  }
}

TEST_P(SameOrder, TheWireIsNotPartOfTheSum) {
  for (const Degrees& degrees : kLayouts) {
    SCOPED_TRACE(to_string(degrees));
    expect_same_bits(run(degrees, {.backend = ThreadBackend::kGloo}), run(degrees));
  }
}

bool of_experts(const std::string& name) { return name.find(".experts.") != std::string::npos; }

/// The gradients of experts, or all others.
Gradients only(Gradients all, bool experts) {
  std::erase_if(all.by_name, [&](const auto& each) { return of_experts(each.first) != experts; });
  return all;
}

// Rows of an expert meet in one product instead of one a rank: only its own gradients are other
// sums.
TEST_P(SameOrder, WhoHoldsTheExpertsChangesNothingButTheirGradients) {
  const std::pair<Degrees, Degrees> pairs[] = {
      {{.shard = 2}, {.shard = 2, .ep = 2}},
      {{.tp = 2}, {.tp = 2, .ep = 2}},
      {{.tp = 2, .sequence = false}, {.tp = 2, .ep = 2, .sequence = false}},
      {{.shard = 2, .tp = 2, .etp = 2}, {.shard = 2, .tp = 2, .ep = 2, .etp = 2}},
      {{.shard = 2, .tp = 2}, {.shard = 2, .tp = 2, .ep = 4}}};
  for (const auto& [whole, parted] : pairs) {
    SCOPED_TRACE(to_string(parted));
    expect_same_bits(only(run(parted), false), only(run(whole), false));
  }
}

// Rows arrive in the order of the batch: the product is one rank's.
TEST_P(SameOrder, ExpertsOfTwoRanksHaveTheGradientsOfOneRank) {
  const auto found = only(run({.shard = 2, .ep = 2}), true);
  const auto expected = only(run({}), true);
  ASSERT_FALSE(expected.by_name.empty());
  expect_same_bits(found.by_name, expected.by_name);
}

INSTANTIATE_TEST_SUITE_P(Families, SameOrder,
                         ::testing::Values("qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32",
                                           "gemma4-fp32"),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden
