// Dry steps of Gemma 4 on a batch with images: the tower's units gather, compute and hold as in a
// counted run of the reference's batch, whose header is all that a dry step reads of it.
#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/temporary_folder.h"
#include "train/dry/dry_batches.h"
#include "unit/train/counted_run.h"

namespace tessera::golden::gemma4_dry_test {
namespace {

using train::DryStep;

struct Case {
  const char* name;
  int ranks = 1;
  int replicas = 1;
  int tp = 1;
  int pp = 1;
  bool trains_tower = false;
  RecomputeMode recompute = RecomputeMode::kNone;
  DType dtype = DType::kFloat32;
};

class DryGemma4 : public ::testing::TestWithParam<Case> {
 protected:
  train::Config config() const {
    const Case& c = GetParam();
    const Layout layout{.ranks = c.ranks, .replicas = c.replicas};
    auto config = training_config(Reference::of("gemma4-fp32"), OptimizerKind::kAdamW, layout);
    config.parallelism.data_parallel_shard_degree = c.ranks / c.replicas / c.tp / c.pp;
    config.parallelism.tensor_parallel_degree = c.tp;
    config.parallelism.pipeline_parallel_degree = c.pp;
    config.precision.param_dtype.dtype = c.dtype;
    config.activation_checkpoint.mode = c.recompute;
    if (c.trains_tower) config.model.freeze = std::vector<std::string>{};
    config.training.local_batch_size = c.pp > 1 ? 1 : std::max(1, 2 * c.tp / c.ranks);
    config.training.steps = 2;
    config.job.dump_folder = (folder_ / "run").string();
    config.metrics.folder = folder_ / "run/metrics";
    config.checkpoint.enable = false;
    return config;
  }

 private:
  const TemporaryFolder folder_;
};

TEST_P(DryGemma4, StepsTheTowerAsARunWithImagesDoes) {
  const Case& c = GetParam();
  const train::Config asked = config();
  const auto source = train::open_model(asked.model);
  const auto has_tower = [](const DryStep& step) {
    return std::ranges::any_of(step.passes, [](const train::DryPass& pass) {
      return pass.unit.find("vision_tower.encoder") != std::string::npos;
    });
  };
  const train::Config filled = train::with_rows_of_data(
      asked, source, train::resolve_parallelism(asked.parallelism, c.ranks));
  EXPECT_EQ(filled.training.seq_len, 24);
  EXPECT_EQ(filled.training.global_batch_size, 2);
  const auto issued = train::issued_in_run(filled, c.ranks);
  const auto held = train::held_by_run(filled, source, c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    const DryStep dry = train::dry_step(filled, source, rank, c.ranks);
    train::expect_same(train::issued_in(dry), issued[static_cast<std::size_t>(rank)], rank);
    train::expect_near(dry, held[static_cast<std::size_t>(rank)], {.text = 0}, rank);
    EXPECT_EQ(has_tower(dry), rank < c.ranks / c.pp) << "rank " << rank;
  }
}

// Without the file nothing says how many images there are: none, which the tables say.
TEST_P(DryGemma4, WithoutItsDataHasNoImagesAndSaysSo) {
  const Case& c = GetParam();
  train::Config asked = config();
  const auto source = train::open_model(asked.model);
  EXPECT_EQ(train::images_text(asked, source),
            "2 images of 36 patches in 2 rows, by the header of data.path");
  asked.data.path = {"/nowhere/batches.safetensors"};
  asked.training.seq_len = 24;
  asked.training.global_batch_size = 2;
  EXPECT_EQ(train::images_text(asked, source),
            "no images in a step, so that no tower is counted: data.path is no .safetensors file "
            "that is here");
  const DryStep step = train::dry_step(asked, source, 0, c.ranks);
  EXPECT_TRUE(std::ranges::none_of(step.passes, [](const train::DryPass& pass) {
    return pass.unit.find("vision_tower") != std::string::npos;
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, DryGemma4,
    ::testing::Values(Case{"one"}, Case{"shards", 2}, Case{"replicas", 2, 2}, Case{"tp", 2, 1, 2},
                      Case{"stages", 2, 1, 1, 2}, Case{"trained", 2, 1, 1, 1, true},
                      Case{"recomputed", 2, 1, 1, 1, true, RecomputeMode::kFull},
                      Case{"bf16", 1, 1, 1, 1, false, RecomputeMode::kNone, DType::kBFloat16}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::golden::gemma4_dry_test
