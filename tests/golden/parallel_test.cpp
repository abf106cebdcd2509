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

namespace tessera::golden::parallel_test {
namespace {

/// A "-mixed" folder holds the model of its family's "-fp32" one in narrower tensors, and is
/// computed in fp32 like that: other numbers on the same paths, for which one layout of each form
/// is enough. Blocks of MXFP4 are unpacked, transposed and cut as a rank reads its part: there
/// every layout counts.
std::vector<Degrees> layouts_of(const std::string& folder, Experts experts) {
  return folder.ends_with("-mixed") ? one_of_each_form(experts) : all_degrees(experts);
}

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
  for (const Degrees& degrees : layouts_of(GetParam(), experts())) {
    SCOPED_TRACE(to_string(degrees));
    expect_within_bounds(
        run_gradients(config_for(GetParam(), degrees), layout_of(degrees), reference().batches()),
        reference());
  }
}

std::vector<std::string> folders() {
  std::vector<std::string> all(kFolders);
  const auto with_experts = folders_with_experts();
  all.insert(all.end(), with_experts.begin(), with_experts.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenParallel, ::testing::ValuesIn(folders()),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden::parallel_test
