// Small runs of right layouts: nothing is found in any; and of what has to be made smaller.
#include "base/test_hooks.h"
#include "proof.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "train/check/check_run.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/small/compare_runs.h"
#include "unit/train/drawn_run.h"

namespace tessera::train::small_runs_test {
namespace {

std::string as_text(const std::vector<check::Finding>& findings) {
  std::string text;
  for (const auto& finding : findings) text += to_string(finding) + "\n";
  return text;
}

// Every family and form of layout, drawn by seed.
TEST(SmallRuns, FindNothingInRightLayouts) {
  const auto first = static_cast<std::uint32_t>(test::environment_number("TESSERA_SMALL_SEED", 1));
  const auto draws = static_cast<std::uint32_t>(
      test::environment_number("TESSERA_SMALL_DRAWS", test::full_proof() ? 400 : 12));
  for (std::uint32_t seed = first; seed < first + draws; ++seed) {
    const TemporaryFolder folder;
    const Drawn d = over_cp(drawn(seed), seed);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": " << d);
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const auto source = open_model(config.model, config.lora);
    const auto run = small_run(config, source, resolve_parallelism(config.parallelism, d.ranks()));
    const SeenRun seen = run_small(run);
    ASSERT_EQ(seen.refused, "");
    for (const SeenStep& step : seen.steps) EXPECT_GT(step.norm, 0.0);
    EXPECT_EQ(as_text(check_run(config, source, d.ranks()).report.findings), "")
        << to_string(mesh_shape(run.dims));
  }
}

// Naive: values of the small model are compared as whole rows, and cp is left out of it.
TEST(SmallRuns, FindWhatIsWrongAmongRanksThatShareRows) {
  Drawn d;
  d.family = "qwen3";
  d.shard = 1;
  d.cp = 2;
  for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
    d.context_form = form;
    const DrawnRun drawn_run(d);
    const auto run = small_run(drawn_run.config, drawn_run.source,
                               resolve_parallelism(drawn_run.config.parallelism, d.ranks()));
    EXPECT_EQ(run.dims.cp, 2);
    EXPECT_EQ(run.dims.context_form, form);
    EXPECT_EQ(as_text(compare_in_small(run).findings), "");
    // Labels of one rank's positions are others.
    const test_hooks::Set otherwise(test_hooks::took_micro_batch,
                                    [](const Mesh& mesh, const MicroBatch& batch) {
                                      if (mesh.coordinate(axis::kContext) == 1)
                                        batch.targets.fill_(5);
                                    });
    const auto findings = compare_in_small(run).findings;
    ASSERT_FALSE(findings.empty());
    EXPECT_EQ(findings.front().axis, "cp") << to_string(findings.front());
  }
}

// Layers with a state, in each axis' layout: key heads over tp, experts over ep, stages.
TEST(SmallRuns, FindNothingInRightLayoutsOfLayersWithAState) {
  Drawn heads;
  heads.family = "qwen3-next";
  heads.routed = true;
  Drawn stages = heads;
  heads.tp = heads.ep = 2;
  stages.pp = stages.shard = 2;
  stages.micro_batches = 2;
  Drawn groups = heads;
  groups.family = "nemotron-h";
  for (const Drawn& d : {heads, stages, groups}) {
    const TemporaryFolder folder;
    SCOPED_TRACE(::testing::Message() << d);
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const auto source = open_model(config.model, config.lora);
    EXPECT_GT(std::ranges::count(source.spec.layer_types, models::LayerType::kLinear), 0);
    EXPECT_EQ(as_text(check_run(config, source, d.ranks()).report.findings), "");
  }
}

/// A run of experts that lie on the ranks of tp: there is one data rank.
Drawn experts_on_tp() {
  Drawn d;
  d.family = "qwen3-moe";
  d.routed = true;
  d.tp = d.ep = 2;
  return d;
}

// The axis of experts alone needs ranks of tp: one data rank's rows cannot be cut over two.
TEST(SmallRuns, NameAxesWhereOneDataRankHasAllRows) {
  const TemporaryFolder folder;
  const Drawn d = experts_on_tp();
  const Config config = config_of(folder, d);
  write_model(folder, d.family + "-fp32", make_room_for_bytes);
  const auto source = open_model(config.model, config.lora);
  const auto run = small_run(config, source, resolve_parallelism(config.parallelism, d.ranks()));
  ASSERT_EQ(run.data_ranks, 1);
  const test_hooks::Set otherwise(test_hooks::took_micro_batch,
                                  [](const Mesh& mesh, const MicroBatch& batch) {
                                    if (mesh.coordinate(axis::kTensor) == 1) batch.targets.fill_(5);
                                  });
  const auto findings = compare_in_small(run).findings;
  ASSERT_FALSE(findings.empty());
  for (const auto& finding : findings) EXPECT_NE(finding.axis, "") << to_string(finding);
}

TEST(SmallRuns, AdaptersOfTheWholeModelFitTheSmallOne) {
  const TemporaryFolder folder;
  Drawn d;
  d.family = "qwen3";
  d.shard = 2;
  const Config config = config_of(folder, d);
  write_model(folder, d.family + "-fp32", make_room_for_bytes);
  auto source = open_model(config.model, config.lora);
  source.lora = {.rank = 128,
                 .alpha = 256,
                 .dropout = 0.5,
                 .layers = {"model.layers.20.self_attn.q_proj", "model.layers.20.mlp.up_proj"}};
  const auto run = small_run(config, source, resolve_parallelism(config.parallelism, d.ranks()));
  EXPECT_EQ(run.source.lora.scale(), 2.0);
  EXPECT_EQ(run.source.lora.dropout, 0.0);
  EXPECT_EQ(
      run.source.lora.layers,
      (std::vector<std::string>{"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj",
                                "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}));
  EXPECT_EQ(as_text(compare_in_small(run).findings), "");
}

}  // namespace
}  // namespace tessera::train::small_runs_test
