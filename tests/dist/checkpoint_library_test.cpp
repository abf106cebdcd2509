// The library's checkpoints: any number of ranks resumes what any other saved, the format is the
// trainer's, and a checkpoint that does not fit changes nothing.

#include <cmath>

#include "base/test_hooks.h"
#include "checkpoint/saver.h"
#include "dist/checkpoint_tensors.h"
#include "dist/held_bytes.h"
#include "dist/stepped.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tessera/checkpoint.h"
#include "tessera/clip.h"
#include "tessera/group.h"
#include "train/parallelize.h"
#include "train/resume/resume.h"

namespace tessera::test::checkpoint_library_test {
namespace {

namespace fs = std::filesystem;

/// A module of a user's: two dtypes, a frozen parameter, two names of one, buffers.
class Own : public torch::nn::Module {
 public:
  explicit Own(std::uint64_t seed, std::int64_t width = 13) {
    wide = register_module("wide", std::make_shared<Affine>(seed, 7, width));
    narrow = register_module("narrow", std::make_shared<Affine>(seed + 1, width, 5, at::kBFloat16));
    frozen = register_parameter("frozen", seeded(seed + 2, {3, 3}), /*requires_grad=*/false);
    tied = register_parameter("tied", narrow->weight);
    count = register_buffer("count", at::full({2}, static_cast<std::int64_t>(seed), at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return narrow->forward(wide->forward(x)); }
  std::shared_ptr<Affine> wide, narrow;
  at::Tensor frozen, tied, count;
};

struct Trained {
  Trained(World& world, int replicas, std::uint64_t seed, std::int64_t width = 13)
      : module(std::make_shared<Own>(seed, width)),
        model(fully_shard(module, data_mesh(world, replicas))),
        optimizer(make_adamw(model, adamw(0.01))) {}

  void step(int number) { step_by_name(model, *optimizer, number); }
  Tensors all() const { return whole_state(model, *optimizer); }
  std::shared_ptr<Own> module;
  Sharded<Own> model;
  std::unique_ptr<Optimizer> optimizer;
};

void load_plain(torch::nn::Module& module, const Tensors& values) {
  const at::NoGradGuard no_grad;
  for (auto& entry : module.named_parameters()) entry.value().copy_(values.at(entry.key()));
}

/// After `steps` steps on these ranks, and saved there in `folder`.
Tensors saved_after(const RanksOfRun& on, int steps, const fs::path& folder) {
  Tensors values;
  ranks(on.ranks).run([&](World& world) {
    Trained run(world, on.replicas, 1);
    for (int step = 1; step <= steps; ++step) run.step(step);
    save_checkpoint(run.model, *run.optimizer, folder, steps,
                    {.user = {{"epoch", std::int64_t{3}}, {"data", "rows \"ä\"\n.bin"}}});
    auto all = run.all();
    if (world.rank() == 0) values = std::move(all);
  });
  return values;
}

constexpr RanksOfRun kLayouts[] = {{1, 1}, {2, 1}, {3, 1}, {4, 2}};

TEST(LibraryCheckpoint, AnyNumberOfRanksContinuesAsTheRunThatNeverStopped) {
  const TemporaryFolder folder;
  for (const auto& from : kLayouts) {
    const auto name = concat("from ", from.ranks);
    const auto saved = saved_after(from, 2, folder / name);
    const auto whole = saved_after(from, 4, folder / concat(name, " to the end"));
    CheckpointFolder::open(folder / name).verify_all();
    for (const auto& to : kLayouts) {
      SCOPED_TRACE(concat(from.ranks, " to ", to.ranks));
      ranks(to.ranks).run([&](World& world) {
        Trained run(world, to.replicas, 50);
        run.step(9);  // what it had goes
        run.model.unshard();
        const auto loaded = load_checkpoint(run.model, *run.optimizer, folder / name);
        EXPECT_EQ(loaded.step, 2);
        EXPECT_EQ(loaded.world_size, from.ranks);
        EXPECT_EQ(fs::path(loaded.path), folder / name / "step-2");
        EXPECT_EQ(std::get<std::int64_t>(loaded.user.at("epoch")), 3);
        EXPECT_EQ(std::get<std::string>(loaded.user.at("data")), "rows \"ä\"\n.bin");
        EXPECT_EQ(loaded.user.size(), 2U);
        expect_same(run.all(), saved, "loaded");
        // The handle was unsharded, and shows the new values.
        Own plain(1);
        load_plain(plain, saved);
        const auto x = seeded(9, {4, 7});
        EXPECT_TRUE(same_bits(run.model.forward(x).detach(), plain.forward(x).detach()));
        run.model.reshard();
        for (int step = 3; step <= 4; ++step) run.step(step);
        expect_same(run.all(), whole, "two steps later");
      });
    }
  }
}

/// Rows that are the same on every rank: with a power of two of them sums and means are exact, so
/// that the order of additions does not count.
void train(ShardedChain& model, Optimizer& optimizer, int first, int last, std::vector<double>& to,
           std::int64_t width = 6) {
  for (int step = first; step <= last; ++step) {
    const auto loss = squares(model.handle.forward(input_of(0, step, width)));
    backward(loss);
    clip_grad_norm(model.handle, 1e9);
    optimizer.step();
    model.handle.zero_grad();
    to.push_back(loss.item<double>());
  }
}

// Through forward, backward and reductions, stopped twice.
TEST(LibraryCheckpoint, LossesAreThoseOfTheRunThatNeverStopped) {
  const TemporaryFolder folder;
  const auto run = [&](int count, int first, int last, const char* name) {
    std::vector<double> losses;
    ranks(count).run([&](World& world) {
      ShardedChain model(data_mesh(world), first == 1 ? 1 : 77, 3, 6);
      const auto optimizer = make_adamw(model.handle, adamw(0.01));
      if (first > 1) {
        ASSERT_TRUE(has_checkpoint(world, folder / name));
        const auto loaded = load_checkpoint(model.handle, *optimizer, folder / name);
        EXPECT_EQ(loaded.step, first - 1);
      }
      std::vector<double> mine;
      train(model, *optimizer, first, last, mine);
      save_checkpoint(model.handle, *optimizer, folder / name, last);
      if (world.rank() == 0) losses = mine;
    });
    return losses;
  };
  const auto whole = run(2, 1, 6, "whole");
  auto parts = run(2, 1, 2, "parts");
  for (const auto& loss : run(4, 3, 4, "parts")) parts.push_back(loss);
  for (const auto& loss : run(1, 5, 6, "parts")) parts.push_back(loss);
  EXPECT_EQ(parts, whole);
}

// ---------------------------------------------------------------------------- the trainer's format

// One format: each of the two reads and writes what the other does.
TEST(LibraryCheckpoint, TheTrainersIsReadAndWrittenAsTheTrainerDoes) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({2, 1}, with_steps(config, 3), folder / "run");
  const auto trained = folder / "run/checkpoint";
  ranks(3).run([&](World& world) {
    const auto source = train::open_model(config.model);
    const auto make = [&] {
      return train::parallelize(source, config, data_mesh(world), train::InitialWeights::kLater);
    };
    const auto model = make();
    const auto optimizer = make_adamw(*model, {});
    const auto loaded = load_checkpoint(*model, *optimizer, trained);
    EXPECT_EQ(loaded.step, 3);
    EXPECT_TRUE(loaded.user.empty());
    save_checkpoint(*model, *optimizer, folder / "library", 3);
    const auto again = make();
    const auto again_optimizer = make_adamw(*again, {});
    train::load_checkpoint(CheckpointFolder::open(folder / "library"), *again, *again_optimizer,
                           world);
    save_checkpoint(*again, *again_optimizer, folder / "again", 3);
  });
  const auto expected = all_tensors(trained);
  EXPECT_GT(expected.size(), 20U);
  EXPECT_TRUE(all_tensors(folder / "library") == expected);
  EXPECT_TRUE(all_tensors(folder / "again") == expected);
}

TEST(LibraryCheckpoint, AdaptersAloneAreRefused) {
  const TemporaryFolder folder;
  train_on({1, 1}, with_steps(adapters_run(folder), 1), folder / "run");
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    EXPECT_THAT(
        error_of(ErrorKind::kConfig,
                 [&] { load_checkpoint(run.model, *run.optimizer, folder / "run/checkpoint"); }),
        Says("found adapters alone"));
  });
}

// ---------------------------------------------------------------------------------- what is saved

// Naive: a folder without some rank's file is taken for a checkpoint, or the one before is gone.
TEST(LibraryCheckpoint, WhatCannotBeWrittenIsNotThereAndTheOneBeforeIs) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder / "saved");
  const test_hooks::Set blocked(
      test_hooks::before_checkpoint_write, [&](int rank, std::int64_t step) {
        if (rank == 1 && step == 2) {
          fs::create_directories(store.temporary(2) / "rank_1.safetensors" / "x");
        }
      });
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    run.step(1);
    save_checkpoint(run.model, *run.optimizer, folder / "saved", 1);
    const auto before = run.all();
    run.step(2);
    EXPECT_REFUSED(kIo, save_checkpoint(run.model, *run.optimizer, folder / "saved", 2), "rank 1",
                   "rank_1.safetensors");
    EXPECT_THAT(store.steps(), ElementsAre(1));
    EXPECT_FALSE(fs::exists(store.temporary(2)));
    load_checkpoint(run.model, *run.optimizer, folder / "saved");
    expect_same(run.all(), before);
  });
}

TEST(LibraryCheckpoint, KeepsTheLatestAndLoadsAnyThatIsNamed) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder / "saved");
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    EXPECT_FALSE(has_checkpoint(world, folder / "saved"));
    for (int step = 1; step <= 3; ++step) {
      run.step(step);
      save_checkpoint(run.model, *run.optimizer, folder / "saved", step, {.keep_latest_k = 2});
    }
    EXPECT_TRUE(has_checkpoint(world, folder / "saved"));
    EXPECT_TRUE(has_checkpoint(world, folder / "saved/step-2"));
    EXPECT_EQ(load_checkpoint(run.model, *run.optimizer, folder / "saved/step-2").step, 2);
    EXPECT_EQ(load_checkpoint(run.model, *run.optimizer, folder / "saved").step, 3);
  });
  EXPECT_THAT(store.steps(), ElementsAre(2, 3));
}

TEST(LibraryCheckpoint, ALossScaleContinues) {
  const TemporaryFolder folder;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    GradScaler scaler(run.model, {.init_scale = 1024});
    EXPECT_FALSE(scaler.update(run.model, HUGE_VAL));
    run.step(1);
    save_checkpoint(run.model, *run.optimizer, folder / "saved", 2, {.scaler = &scaler});
    Trained other(world, 1, 50);
    GradScaler restored(other.model);
    load_checkpoint(other.model, *other.optimizer, folder / "saved", &restored);
    EXPECT_EQ(restored.state(), scaler.state());
    EXPECT_EQ(restored.state().skipped_steps, 1);
  });
}

// Naive: the scale is looked at when parameters and moments have been replaced already.
TEST(LibraryCheckpoint, ALossScaleThatAScalerCannotTakeChangesNothing) {
  const TemporaryFolder folder;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    {
      const GradScaler scaler(run.model, {.init_scale = 4});
      run.step(1);
      save_checkpoint(run.model, *run.optimizer, folder / "saved", 1, {.scaler = &scaler});
    }
    Trained other(world, 1, 50);
    other.step(1);
    const auto before = other.all();
    GradScaler scaler(other.model, {.init_scale = 64, .min_scale = 16});
    EXPECT_THAT(
        error_of(
            ErrorKind::kConfig,
            [&] { load_checkpoint(other.model, *other.optimizer, folder / "saved", &scaler); }),
        Says("found a run at scale 4"));
    expect_same(other.all(), before);
    EXPECT_EQ(scaler.scale(), 64);
  });
}

// Naive: the moments that go are kept until the last of those that come is made.
TEST(LibraryCheckpoint, LoadingIntoALiveOptimizerHoldsItsStateOnce) {
  const TemporaryFolder folder;
  ranks(1).run([&](World& world) {
    HeldBytes counter;
    ShardedChain model(data_mesh(world), 1, 8, 64);
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    std::vector<double> losses;
    train(model, *optimizer, 1, 1, losses, 64);
    std::int64_t state = 0;
    for (const auto& one : optimizer->state()) {
      for (const auto& kept : one.kept) state += static_cast<std::int64_t>(kept.values.nbytes());
    }
    ASSERT_GT(state, 8 * 2 * 64 * 4);
    save_checkpoint(model.handle, *optimizer, folder / "saved", 1);
    const auto held = counter.restart();
    load_checkpoint(model.handle, *optimizer, folder / "saved");
    EXPECT_LT(counter.most() - held, state / 4);
  });
}

/// Returns what save_checkpoint() throws on every rank; nothing may be written.
std::string refused_save(const TemporaryFolder& folder, int updates, std::int64_t step,
                         const std::function<SaveOptions(World&)>& options) {
  std::string message;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    for (int update = 1; update <= updates; ++update) run.step(update);
    const auto mine = error_of(ErrorKind::kUsage, [&] {
      save_checkpoint(run.model, *run.optimizer, folder / "saved", step, options(world));
    });
    EXPECT_NE(mine, "");
    EXPECT_FALSE(has_checkpoint(world, folder / "saved"));
    if (world.rank() == 0) message = mine;
  });
  return message;
}

TEST(LibraryCheckpoint, StepsAndValuesThatNoReaderTakesAreRefused) {
  const TemporaryFolder folder;
  const auto none = [](World&) { return SaveOptions(); };
  EXPECT_THAT(refused_save(folder, 3, 2, none), Says("found step 2", "from 3 on", "SaveOptions"));
  EXPECT_THAT(refused_save(folder, 0, 2, none), Says("an optimizer without any update"));
  EXPECT_THAT(refused_save(folder, 0, -1, none), Says("found step -1"));
  EXPECT_THAT(refused_save(folder, 1, 1,
                           [](World& world) {
                             return SaveOptions{.user = {{"epoch", std::int64_t{world.rank()}}}};
                           }),
              Says("found SaveOptions::user \"epoch\" '0' on rank 0 and '1' on rank 1, "));
  EXPECT_THAT(
      refused_save(folder, 1, 1, [](World&) { return SaveOptions{.user = {{"a", "\xff"}}}; }),
      Says("expected UTF-8", "\\xff"));
  EXPECT_THAT(
      refused_save(folder, 1, 1,
                   [](World&) { return SaveOptions{.user = {{"a", std::string(1 << 20, 'x')}}}; }),
      Says("found 1048577 bytes of names and texts"));
}

TEST(LibraryCheckpoint, RanksThatNameOtherFoldersOrStepsAreToldSoAndNothingIsLeft) {
  const TemporaryFolder folder;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    run.step(1);
    const auto refused = [&](const fs::path& path, std::int64_t step) {
      return error_of(ErrorKind::kUsage,
                      [&] { save_checkpoint(run.model, *run.optimizer, path, step); });
    };
    EXPECT_THAT(refused(folder / std::to_string(world.rank()), 1),
                Says("found folder", "0\"' on rank 0", "1\"' on rank 1"));
    EXPECT_THAT(refused(folder / "saved", 1 + world.rank()),
                Says("found step '1' on rank 0 and '2' on rank 1"));
    world.group().barrier();
    for (const auto* name : {"0", "1", "saved"}) EXPECT_FALSE(fs::exists(folder / name)) << name;
  });
}

/// A parameter and a buffer without elements, as a cache that is empty.
struct WithNothing : Affine {
  explicit WithNothing(std::uint64_t seed) : Affine(seed, 7, 13) {
    none = register_parameter("none", at::zeros({0, 3}));
    nothing = register_buffer("nothing", at::zeros({2, 0}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return Affine::forward(x) + none.sum(); }
  at::Tensor none, nothing;
};

TEST(LibraryCheckpoint, TensorsWithoutElementsAreNoObstacle) {
  const TemporaryFolder folder;
  Tensors saved;
  for (const int count : {2, 3, 1}) {
    ranks(count).run([&](World& world) {
      auto model = fully_shard(std::make_shared<WithNothing>(1), data_mesh(world));
      const auto optimizer = make_adamw(model, adamw(0.01));
      std::int64_t step = 0;
      if (has_checkpoint(world, folder / "saved")) {
        step = load_checkpoint(model, *optimizer, folder / "saved").step;
        expect_same(whole_parameters(model), saved, "loaded");
      }
      for (const auto end = step + 2; step < end; ++step) {
        torch::autograd::backward({model(here(at::ones({2, 7}))).square().mean()}, {});
        optimizer->step();
        model.zero_grad();
      }
      save_checkpoint(model, *optimizer, folder / "saved", step);
      auto whole = whole_parameters(model);
      if (world.rank() == 0) saved = std::move(whole);
    });
  }
}

// Naive: each rank writes a cut of all buffers, and a mean of one is next to a variance of another.
TEST(LibraryCheckpoint, BuffersThatDifferBetweenRanksAreThoseOfTheFirst) {
  const TemporaryFolder folder;
  ranks(3).run([&](World& world) {
    const auto rank = static_cast<std::int64_t>(world.rank());
    Trained run(world, 1, 1);
    run.module->count.fill_(100 + rank);
    save_checkpoint(run.model, *run.optimizer, folder / "saved", 0);
    Trained other(world, 1, 2);
    load_checkpoint(other.model, *other.optimizer, folder / "saved");
    EXPECT_TRUE(same_bits(other.module->count, at::full({2}, std::int64_t{100}, at::kLong)));
  });
}

TEST(LibraryCheckpoint, AConfigThatNoReaderTakesIsRefused) {
  const TemporaryFolder folder;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    for (const auto* config : {"", "{", "[]", "{\"a\": 1, \"a\": 2}"}) {
      EXPECT_REFUSED(
          kFormat,
          save_checkpoint(run.model, *run.optimizer, folder / "saved", 0, {.config_json = config}),
          "SaveOptions::config_json");
    }
    EXPECT_FALSE(has_checkpoint(world, folder / "saved"));
  });
}

// Naive: both texts as a whole, cut at the same length before they differ.
TEST(LibraryCheckpoint, OfOptionsThatDifferTheFirstIsSaidAndOfLongOnesThePlace) {
  const TemporaryFolder folder;
  const auto said = [&](const auto& set) {
    return refused_save(folder, 1, 1, [&](World& world) {
      SaveOptions options{.user = {{"data", "rows"}}};
      if (world.rank() == 1) set(options);
      return options;
    });
  };
  EXPECT_THAT(said([](SaveOptions& options) { options.keep_latest_k = 3; }),
              Says("found SaveOptions::keep_latest_k '0' on rank 0 and '3' on rank 1, "));
  EXPECT_THAT(said([](SaveOptions& options) { options.user["epoch"] = std::int64_t{3}; }),
              Says("found SaveOptions::user \"epoch\" on rank 1 and not on rank 0, "));
  EXPECT_THAT(said([](SaveOptions& options) { options.user = {{"zeta", "rows"}}; }),
              Says("found SaveOptions::user \"data\" on rank 0 and not on rank 1, "));
  EXPECT_THAT(said([](SaveOptions& options) { options.user["data"] = std::int64_t{3}; }),
              Says("SaveOptions::user \"data\" '\"rows\"' on rank 0 and '3' on rank 1, "));
  const auto longer = [&](std::string config, std::string other) {
    return refused_save(folder, 1, 1, [&](World& world) {
      return SaveOptions{.config_json = world.rank() == 0 ? config : other};
    });
  };
  const std::string same(5000, 'x');
  const auto message = longer("{\"a\": \"" + same + "b\"}", "{\"a\": \"" + same + "c\"}");
  EXPECT_THAT(message, Says("found SaveOptions::config_json ...'xxx", "xb", "xc"));
  EXPECT_LT(message.size(), 400U);
}

// --------------------------------------------------------------------------------- what is loaded

/// Returns what every rank throws where `make`'s module and optimizer load; they stay as they were.
template <class Module, class MakeOptimizer>
void expect_refused(const fs::path& path, ErrorKind kind, const std::shared_ptr<Module>& module,
                    World& world, const PrecisionPolicy& policy, const MakeOptimizer& make,
                    const std::string& says) {
  auto model = fully_shard(module, data_mesh(world), policy);
  const auto optimizer = make(model);
  const auto before = whole_parameters(model);
  EXPECT_THAT(error_of(kind, [&] { load_checkpoint(model, *optimizer, path); }), Says(says));
  expect_same(whole_parameters(model), before, says);
  for (const auto& state : optimizer->state()) EXPECT_TRUE(state.kept.empty()) << says;
}

TEST(LibraryCheckpoint, WhatDoesNotFitChangesNothing) {
  const TemporaryFolder folder;
  saved_after({2, 1}, 1, folder / "saved");
  const auto path = folder / "saved";
  class More : public Own {
   public:
    More() : Own(1) { register_parameter("more", seeded(4, {2})); }
    at::Tensor forward(const at::Tensor& x) { return Own::forward(x); }
  };
  class Less : public torch::nn::Module {
   public:
    Less() {
      wide = register_module("wide", std::make_shared<Affine>(1, 7, 13));
      register_parameter("tied", seeded(2, {5, 13}, at::kBFloat16));
    }
    at::Tensor forward(const at::Tensor& x) { return wide->forward(x); }
    std::shared_ptr<Affine> wide;
  };
  const auto with_adamw = [](const ShardedBase& model) { return make_adamw(model, {}); };
  const auto with_sgd = [](const ShardedBase& model) { return make_sgd(model, {}); };
  ranks(3).run([&](World& world) {
    const auto refused = [&](ErrorKind kind, const auto& module, const auto& make,
                             const std::string& says, const PrecisionPolicy& policy = {}) {
      expect_refused(path, kind, module, world, policy, make, says);
    };
    const auto format = ErrorKind::kFormat;
    refused(format, std::make_shared<More>(), with_adamw, "found no tensor 'model/more'");
    refused(format, std::make_shared<Less>(), with_adamw, "expected only those of the model");
    refused(format, std::make_shared<Own>(1, 12), with_adamw, "load it into the module that was");
    refused(ErrorKind::kConfig, std::make_shared<Own>(1), with_sgd,
            "load_checkpoint: found 'SGD', expected 'AdamW'");
    refused(ErrorKind::kConfig, std::make_shared<Own>(1), with_adamw,
            "expected one that keeps exp_avg, exp_avg_sq, master_remainder", without_master());
    EXPECT_THAT(error_of(ErrorKind::kIo,
                         [&] {
                           Trained run(world, 1, 1);
                           load_checkpoint(run.model, *run.optimizer, folder / "other");
                         }),
                Says("found no checkpoint"));
  });
  // On one rank, which looks at the parameters before the optimizer's tensors.
  ranks(1).run([&](World& world) {
    PrecisionPolicy in_float32;
    in_float32.storage_dtype = DType::kFloat32;
    expect_refused(path, ErrorKind::kFormat, std::make_shared<Own>(1), world, in_float32,
                   with_adamw, "PrecisionPolicy::storage_dtype");
  });
}

// Naive: the moments of one model go into a file with the parameters of another.
TEST(LibraryCheckpoint, AnOptimizerOfAnotherModelIsRefused) {
  const TemporaryFolder folder;
  ranks(2).run([&](World& world) {
    Trained run(world, 1, 1);
    Trained other(world, 1, 1);
    for (const bool saves : {true, false}) {
      EXPECT_THAT(error_of(ErrorKind::kUsage,
                           [&] {
                             if (saves) {
                               save_checkpoint(run.model, *other.optimizer, folder / "saved", 0);
                             } else {
                               load_checkpoint(run.model, *other.optimizer, folder / "saved");
                             }
                           }),
                  Says("which is no parameter of this handle"));
    }
  });
}

}  // namespace
}  // namespace tessera::test::checkpoint_library_test
