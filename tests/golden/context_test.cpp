// `tessera gradients` with rows that ranks of cp share, against transformers: every parameter's
// gradient by name and the logits, of every family in both forms, with every other axis; a part of
// them in ./test --all, all under `scripts/full context`. And against one rank: with as many parts
// the logits have its bits.
//
// The class of bug: positions from 0 on each rank, masks cut at a rank's positions, labels counted
// by each rank, pieces joined in another order. Rows of the data are 24 tokens and its windows and
// chunks 6 to 8, so that both cross the borders of parts.

#include "golden/degrees.h"
#include "proof.h"
#include "support/temporary_folder.h"

namespace tessera::golden::context_test {
namespace {

constexpr auto kGather = ContextForm::kGather;
constexpr auto kHeads = ContextForm::kHeads;

std::vector<Degrees> layouts_of(Experts experts) {
  std::vector<Degrees> shapes{{.cp = 2},
                              {.cp = 4},
                              {.tp = 2, .cp = 2},
                              {.tp = 2, .sequence = false, .cp = 2},
                              {.shard = 2, .cp = 2},
                              {.replicate = 2, .cp = 2}};
  if (experts == Experts::kSome) {
    const Degrees more[] = {{.ep = 2, .cp = 2},
                            {.tp = 2, .ep = 4, .cp = 2},
                            {.tp = 2, .etp = 2, .cp = 2},
                            {.tp = 2, .router = RouterTokens::kAll, .cp = 2}};
    shapes.insert(shapes.end(), std::begin(more), std::end(more));
  }
  std::vector<Degrees> all;
  for (Degrees shape : shapes) {
    for (const ContextForm form : {kGather, kHeads}) {
      shape.form = form;
      all.push_back(shape);
    }
  }
  return all;
}

/// What a layout of the folder is refused for; empty: it goes.
std::string refusal(const std::string& folder, const Degrees& degrees) {
  const models::ModelSpec spec = spec_of(folder);
  if (has_state(spec)) return "state is not passed";
  if (heads_of(folder) % degrees.tp != 0) return undivided_heads(folder, degrees.tp);
  for (const std::int64_t heads : kv_heads_of(folder)) {
    if (degrees.form == kHeads && heads % (degrees.cp * degrees.tp) != 0) {
      return "context_parallel_form";
    }
  }
  return "";
}

std::vector<std::string> folders() {
  std::vector<std::string> all = all_folders();
  std::erase_if(all, [](const std::string& folder) { return folder.ends_with("-mixed"); });
  return all;
}

class GoldenContext : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
};

TEST_P(GoldenContext, EveryGradientIsTransformersWhereRanksShareRows) {
  const auto all = layouts_of(experts_of(GetParam()));
  for (const Degrees& degrees : test::in_turn(all, 3, folders(), GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    const auto run = [&] {
      return run_gradients(config_for(GetParam(), degrees), layout_of(degrees),
                           reference().batches());
    };
    const std::string refused = refusal(GetParam(), degrees);
    if (refused.empty()) {
      expect_within_bounds(run(), reference());
    } else {
      EXPECT_THAT(error_of(ErrorKind::kConfig, run), Says(refused));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenContext, ::testing::ValuesIn(folders()), folder_name);

}  // namespace
}  // namespace tessera::golden::context_test
