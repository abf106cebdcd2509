// `tessera gradients` under tensor, expert and data parallelism against transformers: every
// parameter's gradient by name, in every layout that the family's sizes divide; the others are
// refused with their rule.
//
// Thread ranks; processes are tests/cli/layout_gradients_test.cpp's. The class of bug: a gradient
// that is summed twice over an axis, or not at all, is off by a factor of the axis' size or by what
// the other ranks had, and the bounds are 5e-5.
#include <gtest/gtest.h>

#include <algorithm>

#include "golden/degrees.h"

namespace tessera::golden {
namespace {

class GoldenParallel : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  Experts experts() const {
    const bool some = std::ranges::any_of(reference().gradients(), [](const auto& each) {
      return each.first.find(".experts.") != std::string::npos;
    });
    return some ? Experts::kSome : Experts::kNone;
  }
};

TEST_P(GoldenParallel, EveryGradientIsTransformersInEveryLayout) {
  for (const Degrees& degrees : all_degrees(experts())) {
    SCOPED_TRACE(to_string(degrees));
    expect_within_bounds(
        run_gradients(config_for(GetParam(), degrees), layout_of(degrees), reference().batches()),
        reference());
  }
}

std::vector<std::string> folders() {
  std::vector<std::string> all(kFolders);
  all.insert(all.end(), kMoeFolders.begin(), kMoeFolders.end());
  all.insert(all.end(), kDeepseekFolders.begin(), kDeepseekFolders.end());
  all.insert(all.end(), kGemmaFolders.begin(), kGemmaFolders.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenParallel, ::testing::ValuesIn(folders()),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden
