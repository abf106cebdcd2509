// [activation_checkpoint] where ranks share layers and experts: a recomputed layer sends its
// forward a second time, in the same order, to ranks that send theirs. The same functions on the
// same rows and the same addends: every bit is that of mode "none". In ./test --all a third of the
// layouts for each family with experts, all of them under `scripts/full golden`.

#include "golden/degrees.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::recompute_layouts_test {
namespace {

const std::vector<std::string> kFamilies{"llama-fp32", "qwen3-moe-fp32", "gpt-oss-fp32",
                                         "deepseek-v2-fp32", "gemma4-fp32"};

class RecomputeLayouts : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Degrees> layouts() const {
    std::vector<Degrees> all{{.tp = 2}, {.tp = 2, .sequence = false}, {.shard = 2, .tp = 2}};
    if (GetParam().starts_with("llama")) return all;
    all.push_back({.tp = 2, .router = RouterTokens::kAll});
    all.push_back({.shard = 2, .ep = 2});
    all.push_back({.tp = 2, .ep = 2});
    all.push_back({.shard = 2, .tp = 2, .ep = 4});
    all.push_back({.tp = 2, .etp = 2});
    all.push_back({.shard = 2, .tp = 2, .ep = 2, .etp = 2});
    return all;
  }
  std::vector<Degrees> few_layouts() const {
    if (GetParam().starts_with("llama")) return {{.tp = 2}};
    return {{.tp = 2, .ep = 2}, {.tp = 2, .etp = 2}, {.tp = 2, .sequence = false}};
  }
  void expect_no_bit_changes(train::Config config, const Layout& layout, Routing routing) const {
    const std::string batch = Reference::of(GetParam()).batches();
    const auto expected = run_gradients(config, layout, batch, routing);
    for (const auto mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
      SCOPED_TRACE(mode == RecomputeMode::kFull ? "full" : "selective");
      config.activation_checkpoint.mode = mode;
      expect_same_bits(run_gradients(config, layout, batch, routing), expected);
    }
  }
};

TEST_P(RecomputeLayouts, GradientsHaveTheBitsOfModeNone) {
  // One family has no experts: no other one would run the rest of its layouts.
  const std::size_t parts = GetParam().starts_with("llama") ? 1 : 3;
  for (const Degrees& degrees : test::in_turn(layouts(), parts, kFamilies, GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    expect_no_bit_changes(config_for(GetParam(), degrees), layout_of(degrees), Routing::kOwn);
  }
}

// Routing of a batch file is looked up again by the recomputation.
TEST_P(RecomputeLayouts, InBFloat16WithTheRecordedRoutingToo) {
  for (const Degrees& degrees : few_layouts()) {
    SCOPED_TRACE(to_string(degrees));
    auto config = config_for(GetParam(), degrees);
    config.precision = {};  // bf16 compute
    expect_no_bit_changes(config, layout_of(degrees), Routing::kImposed);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RecomputeLayouts, ::testing::ValuesIn(kFamilies), folder_name);

using RecomputedRouters = RecomputeLayouts;

// The auxiliary loss has its counts from the first forward, and its gradient once.
TEST_P(RecomputedRouters, HaveTheAuxiliaryLossOnce) {
  for (const Degrees& degrees : few_layouts()) {
    SCOPED_TRACE(to_string(degrees));
    auto config = config_for(GetParam(), degrees);
    config.model.aux_loss_coef = 0.7;
    expect_no_bit_changes(config, layout_of(degrees), Routing::kOwn);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RecomputedRouters,
                         ::testing::Values("qwen3-moe-fp32", "gpt-oss-fp32"), folder_name);

}  // namespace
}  // namespace tessera::golden::recompute_layouts_test
