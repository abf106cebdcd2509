// Runs that train adapters: the same bits on any number of ranks and after a resumption, dropout
// included, with nothing but adapters in their checkpoints.

#include "dist/checkpoint_tensors.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "models/adapters.h"
#include "models/model_spec.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/shard.h"
#include "train/resume/resume.h"

namespace tessera::test::lora_run_test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kAdapted = 2 + 2 + 1;  // q and o of two layers, one down_proj

std::map<std::string, std::vector<std::byte>> tensors_of(const fs::path& run, std::int64_t step) {
  return all_tensors(run / "checkpoint" / concat("step-", step));
}

// One row a forward everywhere: what is added is the same in the same order ([Note: same bits] of
// golden/gradients_test.cpp), and no tied weight is trained. The norm is a sum in the order of
// shards: clipping would bring that in.
TEST(LoraRun, AdaptersHaveTheBitsOfThePlainRunOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  for (const int ranks : {2, 3, 4}) {
    SCOPED_TRACE(ranks);
    auto config = adapters_run(folder);
    config.training.local_batch_size = 1;
    config.training.global_batch_size = ranks;
    config.training.max_norm = 0;
    const auto plain = train_on({1, 1}, with_steps(config, 4), folder / concat("plain ", ranks));
    const auto found =
        train_on({ranks, 1}, with_steps(config, 4), folder / concat("ranks ", ranks));
    EXPECT_EQ(found.losses, plain.losses);
    EXPECT_EQ(tensors_of(folder / concat("ranks ", ranks), 4),
              tensors_of(folder / concat("plain ", ranks), 4));
  }
}

TEST(LoraRun, ResumedOnTheSameLayoutHasTheBitsOfTheUndisturbedRun) {
  const TemporaryFolder folder;
  const auto config = adapters_run(folder);
  int number = 0;
  std::vector<RanksOfRun> layouts{{4, 2}, {1, 1}, {3, 1}};
  if (place().device != "cpu" && !full_proof()) layouts.resize(1);
  for (const RanksOfRun& layout : layouts) {
    const auto whole = folder / concat("whole ", ++number);
    const auto parts = folder / concat("parts ", number);
    const auto undisturbed = train_on(layout, with_steps(config, 6), whole);
    const auto first = train_on(layout, with_steps(config, 6), parts, [](World&) {
      train::TrainingHooks hooks;
      hooks.stop_requested = [asked = 0]() mutable { return asked++ == 3; };
      return hooks;
    });
    EXPECT_EQ(first.result.steps, 3);
    const auto second = train_on(layout, with_steps(config, 6), parts);
    auto losses = first.losses;
    losses.insert(losses.end(), second.losses.begin(), second.losses.end());
    EXPECT_EQ(losses, undisturbed.losses);
    EXPECT_EQ(tensors_of(parts, 6), tensors_of(whole, 6));
  }
}

// Two rows a step, one a forward: each layout adds the same two gradients.
TEST(LoraRun, ResumedOnOtherLayoutsHasTheBitsOfTheUndisturbedRun) {
  const TemporaryFolder folder;
  auto config = adapters_run(folder);
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 2;
  config.training.max_norm = 0;
  const auto undisturbed = train_on({1, 1}, with_steps(config, 6), folder / "whole");
  std::vector<double> losses;
  std::int64_t done = 0;
  for (const RanksOfRun& layout : {RanksOfRun{2, 1}, RanksOfRun{1, 1}, RanksOfRun{2, 2}}) {
    const std::int64_t last = done + 2;
    const auto part = train_on(layout, with_steps(config, 6), folder / "parts", [&](World&) {
      train::TrainingHooks hooks;
      hooks.stop_requested = [at = done, last]() mutable { return at++ == last; };
      return hooks;
    });
    losses.insert(losses.end(), part.losses.begin(), part.losses.end());
    EXPECT_EQ(part.result.steps, last);
    done = last;
  }
  EXPECT_EQ(losses, undisturbed.losses);
  EXPECT_EQ(tensors_of(folder / "parts", 6), tensors_of(folder / "whole", 6));
}

// Dropout included: what a recomputed layer drops follows from its place, and a base that is whole
// on every rank has the values of one that is sharded.
TEST(LoraRun, RecomputationAndAWholeBaseChangeNoBit) {
  const TemporaryFolder folder;
  const auto config = adapters_run(folder);
  const auto plain = train_on({2, 1}, with_steps(config, 3), folder / "plain");
  for (const auto mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
    auto other = config;
    other.activation_checkpoint.mode = mode;
    const auto run = folder / (mode == RecomputeMode::kFull ? "full" : "selective");
    EXPECT_EQ(train_on({2, 1}, with_steps(other, 3), run).losses, plain.losses);
    EXPECT_EQ(tensors_of(run, 3), tensors_of(folder / "plain", 3));
  }
  auto whole = config;
  whole.model.frozen = FrozenAs::kReplicate;
  EXPECT_EQ(train_on({2, 1}, with_steps(whole, 3), folder / "whole").losses, plain.losses);
  EXPECT_EQ(tensors_of(folder / "whole", 3), tensors_of(folder / "plain", 3));
}

TEST(LoraRun, ACheckpointHoldsTheAdaptersAndTheirMomentsAlone) {
  const TemporaryFolder folder;
  const auto config = adapters_run(folder);
  train_on({2, 1}, with_steps(config, 3), folder / "run");
  std::size_t bytes = 0;
  std::size_t steps = 0;
  const auto values = tensors_of(folder / "run", 3);
  for (const auto& [name, value] : values) {
    EXPECT_TRUE(models::is_adapter(name)) << name;
    bytes += value.size();
    steps += name.starts_with("optim/step/") ? 1U : 0U;
  }
  EXPECT_EQ(values.size(), 2 * kAdapted * 4);  // values, two moments, the number of steps
  EXPECT_EQ(steps, 2 * kAdapted);
  // q: 16 -> 16, o: 16 -> 16, down: 24 -> 16, in fp32, three times; a step is an i64.
  const std::size_t elements = 3 * (4 * (16 + 16) + (24 + 16));
  EXPECT_EQ(bytes, 3 * 4 * elements + 8 * steps);
  std::uintmax_t on_disk = 0;
  for (int rank = 0; rank < 2; ++rank) {
    on_disk += fs::file_size(folder / concat("run/checkpoint/step-3/rank_", rank, ".safetensors"));
  }
  EXPECT_LT(on_disk, fs::file_size(folder / "base/checkpoint/step-2/rank_0.safetensors") / 2);
  const auto manifest = CheckpointFolder::open(folder / "run/checkpoint/step-3").manifest();
  ASSERT_TRUE(manifest.lora);
  EXPECT_EQ(manifest.model_path, config.model.path);
  EXPECT_EQ(manifest.lora->rank, 3);
  EXPECT_EQ(manifest.lora->dropout, config.lora.dropout);
  EXPECT_EQ(manifest.lora->layers.size(), kAdapted);
}

TEST(LoraRun, TheBaseIsFrozenInItsComputeDtypeAndAdaptersAreFloat32) {
  const TemporaryFolder folder;
  train_on({2, 1}, with_steps(adapters_run(folder), 1), folder / "run", [](World&) {
    train::TrainingHooks hooks;
    hooks.after_step = [](const train::StepMetrics&, const ShardedBase& model) {
      for (const auto& view : model.shards()) {
        const bool is_adapter = models::is_adapter(view.contract->name);
        EXPECT_EQ(view.shard.scalar_type(), is_adapter ? at::kFloat : at::kBFloat16);
        EXPECT_EQ(view.shard.requires_grad(), is_adapter) << view.contract->name;
      }
    };
    return hooks;
  });
}

TEST(LoraRun, OtherAdaptersOrAnotherBaseAreRefusedOnResume) {
  const TemporaryFolder folder;
  const auto config = adapters_run(folder);
  train_on({2, 1}, with_steps(config, 1), folder / "run");
  const auto refused = [&](const std::function<void(train::Config&)>& change) {
    auto other = with_steps(config, 2);
    change(other);
    return error_of(ErrorKind::kConfig, [&] { train_on({2, 1}, other, folder / "run"); });
  };
  EXPECT_THAT(refused([](auto& other) { other.lora.rank = 4; }),
              Says("lora.rank: found 4, expected 3 of the checkpoint"));
  EXPECT_THAT(refused([](auto& other) { other.lora = {}; }),
              Says("lora.rank: found 0, expected 3"));
  EXPECT_THAT(refused([](auto& other) { other.lora.alpha = 3.0; }),
              Says("lora.alpha: found 3, expected 6"));
  EXPECT_THAT(refused([](auto& other) { other.lora.dropout = 0.0; }),
              Says("lora.dropout: found 0, expected 0.3"));
  EXPECT_THAT(refused([](auto& other) { other.lora.targets = {"q_proj"}; }),
              Says("lora.targets: found 'model.layers.1.self_attn.q_proj', expected "
                   "'model.layers.0.self_attn.o_proj, model.layers.1.self_attn.q_proj, "));
  EXPECT_THAT(refused([](auto& other) { other.lora.targets = {"q_proj", "o_proj"}; }),
              Says("lora.targets: found no further layer, expected "
                   "'model.layers.1.mlp.down_proj'"));
  auto longer = small_run(folder);
  longer.optimizer.lr = 0.02;
  train_on({}, with_steps(longer, 2), folder / "other base");
  EXPECT_THAT(refused([&](auto& other) {
                other.model.path = (folder / "other base/checkpoint/step-2").string();
              }),
              Says("model.path: found tensors with the hash"));
}

// Naive: as much of the lists is compared as fits into a message.
TEST(LoraRun, ListsOfManyLayersThatDifferInTheLastOneAreRefused) {
  const TemporaryFolder folder;
  train_on({}, with_steps(adapters_run(folder), 1), folder / "run");
  const auto path = folder / "run/checkpoint/step-1";
  auto manifest = CheckpointFolder::open(path).manifest();
  for (int i = 2; i < 60; ++i) {
    manifest.lora->layers.push_back(concat("model.layers.", i, ".self_attn.q_proj"));
  }
  folder.write("run/checkpoint/step-1/manifest.json", to_json(manifest));
  const auto checkpoint = CheckpointFolder::open(path);
  train::RunIdentity identity{.spec = models::parse_spec(checkpoint.config_text()).spec,
                              .data = manifest.data,
                              .data_section = {},
                              .data_section_before = {},
                              .seed = manifest.seed,
                              .lora = manifest.lora};
  ranks(1).run([&](World& world) { train::require_same_run(identity, checkpoint, world); });
  identity.lora->layers.back() = "model.layers.60.self_attn.q_proj";
  EXPECT_THAT(error_of(ErrorKind::kConfig,
                       [&] {
                         ranks(1).run([&](World& world) {
                           train::require_same_run(identity, checkpoint, world);
                         });
                       }),
              Says("lora.targets: found 'model.layers.60.self_attn.q_proj', expected "
                   "'model.layers.59.self_attn.q_proj'",
                   "after 62 layers that both have"));
}

}  // namespace
}  // namespace tessera::test::lora_run_test
