// Writing: while steps run, one at a time, complete or not at all.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <mutex>

#include "base/test_hooks.h"
#include "checkpoint/saver.h"
#include "checkpoint/snapshot.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::checkpoint_save_test {
namespace {

namespace fs = std::filesystem;

/// Something that happens once, and that others wait for.
class Event {
 public:
  void happen() {
    const std::lock_guard lock(mutex_);
    happened_ = true;
    changed_.notify_all();
  }
  /// False where it did not come in a minute: the test fails instead of hanging.
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::minutes(1), [this] { return happened_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
};

train::Config with_checkpoints(const TemporaryFolder& folder, std::int64_t steps,
                               std::int64_t interval) {
  auto config = small_run(folder);
  config.training.steps = steps;
  config.checkpoint.enable = true;
  config.checkpoint.interval = interval;
  return config;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

// Rank 1's writer is held up until five steps later; a step that waited for it would never come.
TEST(CheckpointSaving, TrainingContinuesWhileASlowWriterWrites) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 12, 4);
  Event later;
  std::atomic<bool> came{false};
  const CheckpointStore store(folder / "run/checkpoint");
  const auto run = [&] {
    const test_hooks::Set slow(test_hooks::before_checkpoint_write,
                               [&](int rank, std::int64_t step) {
                                 if (rank == 1 && step == 4) came = later.wait();
                               });
    return train_on({2, 1}, config, folder / "run", [&](World&) {
      train::TrainingHooks hooks;
      hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase&) {
        if (metrics.step == 5) {
          EXPECT_THAT(store.steps(), ElementsAre());
        }
        if (metrics.step == 7) later.happen();
      };
      return hooks;
    });
  }();
  EXPECT_TRUE(came) << "steps 5 to 7 came while it was held up";
  EXPECT_EQ(run.losses.size(), 12U);
  EXPECT_THAT(store.steps(), ElementsAre(4, 8, 12));
  for (const auto step : store.steps()) CheckpointFolder::open(store.complete(step)).verify_all();
  // The values were copied in time, though written late.
  const auto undisturbed = with_checkpoints(folder, 12, 4);
  train_on({2, 1}, undisturbed, folder / "other");
  for (const std::string file : {"step-4/rank_0.safetensors", "step-4/rank_1.safetensors"}) {
    EXPECT_TRUE(read_file(store.folder() / file) == read_file(folder / "other/checkpoint" / file));
  }
}

TEST(CheckpointSaving, TheNextOneWaitsForTheOneBefore) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 6, 1);  // each save meets the last one's writer
  const CheckpointStore store(folder / "run/checkpoint");
  const test_hooks::Set looked(test_hooks::before_checkpoint_write,
                               [&](int rank, std::int64_t step) {
                                 if (rank != 0) return;
                                 const auto steps = store.steps();
                                 EXPECT_EQ(steps.empty() ? 0 : steps.back(), step - 1);
                               });
  train_on({3, 1}, config, folder / "run");
  EXPECT_THAT(store.steps(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(store.latest(), 6);
}

TEST(CheckpointSaving, KeepsTheLatestFewAndLeavesNothingElse) {
  const TemporaryFolder folder;
  auto config = with_checkpoints(folder, 7, 2);
  config.checkpoint.keep_latest_k = 2;
  train_on({2, 1}, config, folder / "run");
  EXPECT_THAT(names_in(folder / "run/checkpoint"), ElementsAre("latest", "step-6", "step-7"));
  EXPECT_THAT(names_in(folder / "run/checkpoint/step-7"),
              ElementsAre("config.json", "manifest.json", "rank_0.safetensors",
                          "rank_1.safetensors", "tensors.jsonl"));
}

// Something is already at the path of step-2: the run continues, nothing is lost.
TEST(CheckpointSaving, AnOldOneThatCannotGoStays) {
  const TemporaryFolder folder;
  auto config = with_checkpoints(folder, 6, 2);
  config.checkpoint.keep_latest_k = 1;
  const CheckpointStore store(folder / "run/checkpoint");
  const test_hooks::Set blocked(test_hooks::before_checkpoint_write,
                                [&](int rank, std::int64_t step) {
                                  if (rank == 0 && step == 2)
                                    fs::create_directories(store.folder() / "step-2.old.tmp/x");
                                });
  const auto run = train_on({2, 1}, config, folder / "run");
  EXPECT_EQ(run.result.steps, 6);
  EXPECT_EQ(store.latest(), 6);
  EXPECT_THAT(store.steps(), ElementsAre(2, 4, 6));
}

TEST(CheckpointSaving, WhatACrashLeftUnfinishedGoesAtTheNextStart) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 2, 2);
  folder.write("run/checkpoint/step-9.tmp/rank_0.safetensors", "torn");
  train_on({2, 1}, config, folder / "run");
  EXPECT_THAT(names_in(folder / "run/checkpoint"), ElementsAre("latest", "step-2"));
}

// A file stands where rank 1 wants to write: the same error on every rank, nothing half done.
TEST(CheckpointSaving, AWritingErrorEndsTheRunAndLeavesTheCheckpointBefore) {
  for (const std::string obstacle :
       {"rank_1.safetensors", "config.json", "tensors.jsonl", "manifest.json"}) {
    SCOPED_TRACE(obstacle);
    const TemporaryFolder folder;
    const auto config = with_checkpoints(folder, 8, 3);
    const CheckpointStore store(folder / "run/checkpoint");
    const auto message = error_of(ErrorKind::kIo, [&] {
      const test_hooks::Set blocked(test_hooks::before_checkpoint_write,
                                    [&](int rank, std::int64_t step) {
                                      const int writer = obstacle == "rank_1.safetensors" ? 1 : 0;
                                      if (step == 6 && rank == writer) {
                                        fs::create_directories(store.temporary(6) / obstacle / "x");
                                      }
                                    });
      train_on({2, 1}, config, folder / "run");
    });
    EXPECT_THAT(message,
                Says("checkpoint of step 6", obstacle, "earlier checkpoints are as they were"));
    EXPECT_THAT(names_in(store.folder()), ElementsAre("latest", "step-3"));
    EXPECT_EQ(store.latest(), 3);
    const auto rest = train_on({2, 1}, config, folder / "run");
    EXPECT_EQ(rest.losses.size(), 5U);
    EXPECT_THAT(store.steps(), ElementsAre(3, 6, 8));
  }
}

TEST(CheckpointSaving, AFolderThatCannotBeWrittenIsRefusedBeforeTheFirstStep) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 2, 2);
  folder.write("run/checkpoint", "a file");
  bool began = false;
  const auto message = error_of(ErrorKind::kIo, [&] {
    train_on({2, 1}, config, folder / "run", [&](World&) {
      train::TrainingHooks hooks;
      hooks.on_first_step = [&](std::int64_t /*done*/) { began = true; };
      return hooks;
    });
  });
  EXPECT_THAT(message, Says("run/checkpoint"));
  EXPECT_FALSE(began);
}

TEST(CheckpointSaving, OneRankThatIsAskedToStopStopsAllAfterTheSameStep) {
  for (const int asked_rank : {0, 2}) {
    const TemporaryFolder folder;
    const auto config = with_checkpoints(folder, 12, 100);
    const auto run = train_on({3, 1}, config, folder / "run", [&](World& world) {
      train::TrainingHooks hooks;
      hooks.stop_requested = [asked = 0, mine = world.rank() == asked_rank]() mutable {
        return mine && asked++ == 4;
      };
      return hooks;
    });
    EXPECT_EQ(run.result.steps, 4);
    EXPECT_EQ(run.losses.size(), 4U);
    EXPECT_EQ(CheckpointStore(folder / "run/checkpoint").latest(), 4);
  }
}

// Asked before the first step, in each step and after each validation batch, of which there are
// three before the first step: the eighth time is within the validation of step 2, after its second
// batch.
TEST(CheckpointSaving, AskedToStopInAValidationLeavesItAndSavesTheStep) {
  for (const int asked_rank : {0, 1}) {
    const TemporaryFolder folder;
    auto config = with_checkpoints(folder, 12, 100);
    config.validation.path = config.data.path;
    config.validation.interval = 2;
    config.validation.steps = 3;
    std::optional<double> val_loss;
    const auto run = train_on({2, 1}, config, folder / "run", [&](World& world) {
      train::TrainingHooks hooks;
      hooks.stop_requested = [asked = 0, mine = world.rank() == asked_rank]() mutable {
        return ++asked == 8 && mine;
      };
      hooks.after_step = [&, rank = world.rank()](const train::StepMetrics& metrics,
                                                  const ShardedBase&) {
        if (rank == 0) val_loss = metrics.val_loss;
      };
      return hooks;
    });
    EXPECT_EQ(run.result.steps, 2);
    EXPECT_NE(run.result.last_val_loss, std::nullopt) << "that before the first step";
    EXPECT_EQ(val_loss, std::nullopt);
    EXPECT_EQ(CheckpointStore(folder / "run/checkpoint").latest(), 2);
  }
}

TEST(CheckpointSaving, AskedToStopBeforeTheFirstStepDoesNone) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 12, 100);
  const auto run = train_on({2, 1}, config, folder / "run", [&](World& world) {
    train::TrainingHooks hooks;
    hooks.stop_requested = [mine = world.rank() == 1] { return mine; };
    return hooks;
  });
  EXPECT_EQ(run.result.steps, 0);
  EXPECT_EQ(CheckpointStore(folder / "run/checkpoint").latest(), std::nullopt);
}

// The loss is no longer finite while the last good checkpoint is still being written.
TEST(CheckpointSaving, ANonFiniteLossWaitsForTheCheckpointUnderWay) {
  const TemporaryFolder folder;
  auto config = with_checkpoints(folder, 12, 4);
  const CheckpointStore store(folder / "run/checkpoint");
  Event spoiled;
  const auto message = error_of(ErrorKind::kNumeric, [&] {
    const test_hooks::Set slow(test_hooks::before_checkpoint_write, [&](int rank, std::int64_t) {
      if (rank == 1) {
        EXPECT_TRUE(spoiled.wait());
      }
    });
    train_on({2, 1}, config, folder / "run", [&](World&) {
      train::TrainingHooks hooks;
      hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase& model) {
        if (metrics.step != 5) return;
        const at::NoGradGuard no_grad;
        for (const auto& view : model.shards()) view.shard.detach().fill_(std::nan(""));
        spoiled.happen();
      };
      return hooks;
    });
  });
  EXPECT_THAT(message, Says("step 6"));
  EXPECT_EQ(store.latest(), 4);
  CheckpointFolder::open(store.folder()).verify_all();
}

// The disk is full, too: what made the loss infinite must not be hidden by that.
TEST(CheckpointSaving, ANonFiniteLossIsToldAlsoWhereTheCheckpointFails) {
  const TemporaryFolder folder;
  const auto config = with_checkpoints(folder, 12, 4);
  const CheckpointStore store(folder / "run/checkpoint");
  Event spoiled;
  const auto message = error_of(ErrorKind::kNumeric, [&] {
    const test_hooks::Set blocked(
        test_hooks::before_checkpoint_write, [&](int rank, std::int64_t step) {
          if (rank != 1) return;
          fs::create_directories(store.temporary(step) / "rank_1.safetensors/x");
          EXPECT_TRUE(spoiled.wait());
        });
    train_on({2, 1}, config, folder / "run", [&](World&) {
      train::TrainingHooks hooks;
      hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase& model) {
        if (metrics.step != 5) return;
        const at::NoGradGuard no_grad;
        for (const auto& view : model.shards()) view.shard.detach().fill_(std::nan(""));
        spoiled.happen();
      };
      return hooks;
    });
  });
  EXPECT_THAT(message, Says("step 6: found loss nan", "parameters concerned"));
  EXPECT_EQ(store.latest(), std::nullopt);
}

TEST(CheckpointSaving, WithoutItNothingIsWrittenAndAFolderThatHoldsSomeIsRefused) {
  const TemporaryFolder folder;
  auto config = with_checkpoints(folder, 2, 1);
  train_on({1, 1}, config, folder / "run");
  config.checkpoint.enable = false;
  config.training.steps = 3;
  const auto message =
      error_of(ErrorKind::kConfig, [&] { train_on({2, 1}, config, folder / "run"); });
  EXPECT_THAT(message, Says("run/checkpoint/step-2"));
  EXPECT_EQ(CheckpointStore(folder / "run/checkpoint").latest(), 2);
  EXPECT_EQ(train_on({2, 1}, config, folder / "other").losses.size(), 3U);
  EXPECT_FALSE(std::filesystem::exists(folder / "other/checkpoint"));
}

/// One parameter, in a child whose name is given.
class NamedChild : public torch::nn::Module {
 public:
  explicit NamedChild(const std::string& name) {
    auto child = register_module(name, std::make_shared<torch::nn::Module>());
    weight_ = child->register_parameter("w", at::ones({6}));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight_; }

 private:
  at::Tensor weight_;
};

// Naive: the model's name fits, and that of what AdamW keeps does not: the end of the first save.
TEST(CheckpointSaving, ANameThatAStateCannotHaveIsRefusedInThePlanOnAllRanks) {
  const TemporaryFolder folder;
  const auto plan = [&](std::size_t name_bytes, const auto& make_optimizer) {
    ranks(2).run([&](World& world) {
      const auto handle =
          fully_shard(std::make_shared<NamedChild>(std::string(name_bytes - 2, 'x')),  // "x.w"
                      data_mesh(world), {});
      const auto optimizer = make_optimizer(handle);
      checkpointing::CheckpointOptions options;
      options.folder = folder / "checkpoint";
      checkpointing::CheckpointSaver(world, std::move(options)).check_plan(handle, *optimizer);
    });
  };
  const auto adamw = [](const auto& handle) { return make_adamw(handle, {}); };
  const auto sgd = [](const auto& handle) { return make_sgd(handle, {}); };
  const auto longest = [](std::string_view prefix) { return kMaxTensorNameBytes - prefix.size(); };
  plan(longest("optim/exp_avg_sq/"), adamw);
  EXPECT_REFUSED(kConfig, plan(longest("optim/exp_avg/"), adamw),
                 "checkpoint: found a tensor with a name of 515 bytes", "optim/exp_avg_sq/",
                 "at most 512");
  plan(longest("optim/step/"), sgd);  // without momentum it keeps the number of updates alone
  EXPECT_REFUSED(kConfig, plan(longest("model/"), sgd), "optim/step/");
}

TEST(CheckpointSnapshot, CutsOfReplicasHoldEachElementOnce) {
  std::vector<checkpointing::StatePart> parts;
  const at::ScalarType dtypes[] = {at::kFloat, at::kLong, at::kBFloat16, at::kDouble, at::kByte};
  std::int64_t total = 0;
  for (int i = 0; i < 20; ++i) {
    const std::int64_t size = i * 7 % 11;
    parts.push_back({concat("p", i),
                     {100},
                     std::nullopt,
                     {{0}, {100}},
                     {3, 3 + size},
                     at::arange(size).to(dtypes[i % 5])});
    total += static_cast<std::int64_t>(parts.back().values.nbytes());
  }
  for (const int replicas : {1, 2, 3, 5, 64}) {
    std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> ranges;
    for (int replica = 0; replica < replicas; ++replica) {
      std::int64_t bytes = 0;
      for (const auto& part : checkpointing::cut(parts, replica, replicas)) {
        ranges[part.name].emplace_back(part.elements.begin, part.elements.end);
        bytes += static_cast<std::int64_t>(part.values.nbytes());
        ASSERT_EQ(part.values.size(0), part.elements.size());
        EXPECT_EQ(part.values[0].item<std::int64_t>(), part.elements.begin - 3);
      }
      EXPECT_LE(std::abs(bytes - total / replicas), 9) << "equal but for an element and rounding";
    }
    for (const auto& part : parts) {
      auto at = part.elements.begin;
      for (const auto& [begin, end] : ranges[part.name]) {
        EXPECT_EQ(begin, at);
        at = end;
      }
      EXPECT_EQ(at, part.elements.end);
    }
  }
}

}  // namespace
}  // namespace tessera::test::checkpoint_save_test
