// Scores before experts (model.score_before_experts), which no reference has: every layout of every
// family with experts against the unsharded model in fp64. That the unsharded one is right is
// unit/moe's to say: the composite of single tokens, with all gradients. In ./test --all a third of
// the layouts for each family, all of them under `scripts/full golden`.
#include <ATen/ATen.h>

#include "golden/faulty_run.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::score_before_test {
namespace {

/// Layouts add the same fp64 numbers in other orders: at most 1.4e-14 was found of any gradient
/// (relative) and 1e-15 of a loss, in all families. 70 times that is far below the 1e-8 that one
/// sum, score or activation in fp32 would leave.
constexpr double kBound = 1e-12;

/// Parameters, gradients and sums in fp64, which no key of the config asks for.
void in_float64(const RankParts& rank) {
  for (GradContract& each : rank.parts.contract.parameters) {
    each.storage.dtype = each.compute.dtype = DType::kFloat64;
    each.accumulate = each.reduce = each.final = each.state = DType::kFloat64;
  }
}

Changes scores_before(bool before) {
  return {.config = [=](train::Config& config) { config.model.score_before_experts = before; },
          .parts = in_float64};
}

const std::vector<std::string> kFamilies{"qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32",
                                         "deepseek-v2-group-fp32", "gemma4-fp32"};

class ScoreBeforeExperts : public ::testing::TestWithParam<std::string> {};

TEST_P(ScoreBeforeExperts, EveryGradientIsThatOfOneRankInEveryLayout) {
  const Step expected = run_step(GetParam(), {}, scores_before(true));
  const Step other = run_step(GetParam(), {}, scores_before(false));
  EXPECT_GT(std::abs(expected.loss - other.loss), 1e-4) << "the key changes nothing";
  for (const Degrees& degrees :
       test::in_turn(all_degrees(Experts::kSome), 3, kFamilies, GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    const Step found = run_step(GetParam(), degrees, scores_before(true));
    ASSERT_EQ(found.refusal + found.forward_refusal, "");
    EXPECT_EQ(found.not_invariant, std::vector<std::string>{});
    EXPECT_NEAR(found.loss, expected.loss, kBound);
    ASSERT_EQ(found.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients) {
      EXPECT_LT(relative_error(found.gradients.at(name), gradient), kBound) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ScoreBeforeExperts, ::testing::ValuesIn(kFamilies), folder_name);

}  // namespace
}  // namespace tessera::golden::score_before_test
