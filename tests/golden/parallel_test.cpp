// `tessera gradients` under tensor, expert and data parallelism against transformers: every
// parameter's gradient by name, in every layout that the family's sizes divide; the others are
// refused with their rule. In ./test --all a third of the layouts for each folder, all of them
// under `scripts/full layouts`.
//
// Thread ranks; processes are tests/cli/layout_gradients_test.cpp's. The class of bug: a gradient
// that is summed twice over an axis, or not at all, is off by a factor of the axis' size or by what
// the other ranks had, and the bounds are 5e-5.

#include "golden/degrees.h"
#include "proof.h"
#include "support/temporary_folder.h"

namespace tessera::golden::parallel_test {
namespace {

/// A "-mixed" folder holds the model of its family's "-fp32" one in narrower tensors, and is
/// computed in fp32 like that: other numbers on the same paths, for which one layout of each form
/// is enough. Blocks of MXFP4 are unpacked, transposed and cut as a rank reads its part: there
/// every layout counts.
std::vector<Degrees> layouts_of(const std::string& folder) {
  const bool is_mixed = folder.ends_with("-mixed");
  auto alike = all_folders();
  std::erase_if(alike, [&](const auto& each) { return each.ends_with("-mixed") != is_mixed; });
  const Experts experts = experts_of(folder);
  return test::in_turn(is_mixed ? one_of_each_form(experts) : all_degrees(experts), 3, alike,
                       folder);
}

class GoldenParallel : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
};

TEST_P(GoldenParallel, EveryGradientIsTransformersInEveryLayout) {
  const std::int64_t heads = heads_of(GetParam());
  for (const Degrees& degrees : layouts_of(GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    const auto run = [&] {
      return run_gradients(config_for(GetParam(), degrees), layout_of(degrees),
                           reference().batches());
    };
    if (heads % degrees.tp == 0) {
      expect_within_bounds(run(), reference());
    } else {
      EXPECT_THAT(error_of(ErrorKind::kConfig, run),
                  Says(concat("expected a divisor of ", undivided_heads(GetParam(), degrees.tp))));
    }
  }
}

std::vector<std::string> folders() {
  std::vector<std::string> all(kFolders);
  const auto with_experts = folders_with_experts();
  all.insert(all.end(), with_experts.begin(), with_experts.end());
  all.insert(all.end(), kGpt2Folders.begin(), kGpt2Folders.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenParallel, ::testing::ValuesIn(folders()), folder_name);

}  // namespace
}  // namespace tessera::golden::parallel_test
