// Optimizer state outside of memory: the same bits as inside, wherever it is read and written; what
// is left in memory; and what cannot be read or written.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "dist/held_bytes.h"
#include "dist/plain.h"
#include "dist/stepped.h"
#include "fsdp/handle.h"
#include "fsdp/optim/offloaded_state.h"
#include "fsdp/optim/optimizer_shards.h"
#include "tessera/checkpoint.h"
#include "tessera/clip.h"
#include "tessera/compile.h"
#include "tessera/grad_scaler.h"
#include "tessera/step_scope.h"
#include "tessera/trainable.h"
#include "unit/io/temporary_folder.h"

namespace tessera::test::offload_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

constexpr std::int64_t kWidth = 7;

PrecisionPolicy stored_in(DType storage, MasterRequest master = MasterRequest::kAuto) {
  PrecisionPolicy policy;
  policy.storage_dtype = storage;
  // Float16 alone would want a scaler.
  policy.param_dtype = storage == DType::kFloat16 ? DType::kBFloat16 : storage;
  policy.optimizer.master = master;
  return policy;
}

/// What is kept and what it is kept for, of one rank.
std::vector<at::Tensor> all_of(const ShardedBase& model, const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& view : model.shards()) all.push_back(view.shard.detach().clone());
  for (const auto& state : optimizer.state()) {
    all.push_back(at::full({}, state.steps));
    for (const auto& kept : state.kept) all.push_back(kept.values.clone());
  }
  return all;
}

void expect_same_list(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected,
                      const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(found[i], expected[i])) << what << ", tensor " << i;
  }
}

/// Bytes of what is kept of the parameter that has most of it.
std::int64_t largest_state(const Optimizer& optimizer) {
  std::int64_t largest = 0;
  for (const auto& state : optimizer.unread_state()) {
    std::int64_t bytes = 0;
    for (const auto& kept : state.kept) bytes += static_cast<std::int64_t>(kept.values.nbytes());
    largest = std::max(largest, bytes);
  }
  return largest;
}

struct Case {
  const char* name;
  DType storage;
  MasterRequest master;
  bool adam;
};
constexpr Case kCases[] = {
    {"AdamW fp32", DType::kFloat32, MasterRequest::kAuto, true},
    {"AdamW fp64", DType::kFloat64, MasterRequest::kAuto, true},
    {"AdamW bf16 and remainder", DType::kBFloat16, MasterRequest::kAuto, true},
    {"AdamW fp16 and copy", DType::kFloat16, MasterRequest::kAuto, true},
    {"AdamW bf16 alone", DType::kBFloat16, MasterRequest::kNone, true},
    {"SGD bf16 and remainder", DType::kBFloat16, MasterRequest::kAuto, false},
    {"SGD fp32", DType::kFloat32, MasterRequest::kAuto, false},
};

class OffloadOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OffloadOnRanks, ::testing::Values(1, 2, 3));

TEST_P(OffloadOnRanks, GivesTheBitsOfStateInMemory) {
  const TemporaryFolder folder;
  ranks(GetParam()).run([&](World& world) {
    for (const auto& [name, storage, master, adam] : kCases) {
      // All state, that of one unit, and none of it matched by its unit alone.
      for (const std::vector<std::string>& match :
           {std::vector<std::string>{}, {"block1"}, {"scale", "block0.a"}}) {
        const auto make = [&] {
          return ShardedChain(data_mesh(world), 1, 3, kWidth, stored_in(storage, master));
        };
        auto inside = make();
        auto outside = make();
        const auto optimizer_of = [&](const ShardedBase& model) {
          return adam ? make_adamw(model, adamw(0.01)) : make_sgd(model, sgd(0.013, 0.9, 0.07));
        };
        const auto of_inside = optimizer_of(inside.handle);
        const auto of_outside = optimizer_of(outside.handle);
        of_outside->offload({.folder = folder.path(), .match = match});
        for (int step = 0; step < 4; ++step) {
          // Once a user writes the parameters; once some have no gradient.
          const auto one = [&](ShardedChain& model, Optimizer& optimizer) {
            if (step == 2) {
              const at::NoGradGuard no_grad;
              for (const auto& view : model.handle.shards()) view.shard.detach().mul_(1.25);
            }
            model.chain->skip = step == 1 ? 1 : -1;
            model.handle.zero_grad();
            const auto x = input_of(world.rank(), step, kWidth).to(to_scalar_type(storage));
            backward(squares(model.handle.forward(x)) / 64);
            clip_grad_norm(model.handle, 1.0);
            optimizer.step();
          };
          one(inside, *of_inside);
          one(outside, *of_outside);
          expect_same_list(
              all_of(outside.handle, *of_outside), all_of(inside.handle, *of_inside),
              concat(name, ", step ", step, ", matching ", match.empty() ? "all" : match.front()));
        }
      }
    }
  });
}

// Naive: parts that begin at odd places give other bits than one call over the whole shard.
TEST(Offload, AShardOfSeveralPartsAndChunksIsSteppedAsOne) {
  const TemporaryFolder folder;
  ranks(1).run([&](World& world) {
    const std::int64_t size = 2 * fsdp::kMasterPart + 12345;
    for (const auto storage : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const bool adam : {true, false}) {
        const auto make = [&] {
          return fully_shard(std::make_shared<Scale>(seeded(3, {size}).to(to_scalar_type(storage))),
                             data_mesh(world), stored_in(storage));
        };
        auto inside = make();
        auto outside = make();
        const auto optimizer_of = [&](const ShardedBase& model) {
          return adam ? make_adamw(model, adamw(0.01)) : make_sgd(model, sgd(0.013, 0.9, 0.07));
        };
        const auto of_inside = optimizer_of(inside);
        const auto of_outside = optimizer_of(outside);
        of_outside->offload({.folder = folder.path()});
        for (int step = 1; step <= 3; ++step) {
          step_by_name(inside, *of_inside, step);
          step_by_name(outside, *of_outside, step);
        }
        expect_same_list(all_of(outside, *of_outside), all_of(inside, *of_inside),
                         concat(to_string(storage), adam ? " AdamW" : " SGD"));
        const auto& traffic = of_outside->offload_traffic();
        EXPECT_EQ(traffic.bytes_read, traffic.bytes_written);
        EXPECT_GE(traffic.bytes_read, of_inside->resident_bytes());
      }
    }
  });
}

TEST(Offload, MemoryHasTwoChunksAndWhatStays) {
  const TemporaryFolder folder;
  ranks(1).run([&](World& world) {
    const std::int64_t size = 20 * fsdp::kMasterPart;  // 160 MiB of moments
    auto model = fully_shard(std::make_shared<Scale>(seeded(3, {size})), data_mesh(world));
    const auto optimizer = make_adamw(model, adamw(0.01));
    optimizer->offload({.folder = folder.path()});
    for (const auto& view : model.shards()) view.shard.mutable_grad() = at::ones({size});
    const HeldBytes held;
    optimizer->step();
    optimizer->step();
    const auto buffers = 2 * fsdp::kMostChunkBytes;
    EXPECT_EQ(optimizer->resident_bytes(), buffers);
    // Beside them numbers of steps alone.
    EXPECT_LE(held.most(), buffers + 4096);
    EXPECT_GE(held.bytes(), buffers);
    // What reads it all has it in memory for as long as it keeps it.
    EXPECT_EQ(optimizer->state().front().kept.front().values.numel(), size);
    EXPECT_LE(held.bytes(), buffers + 4096);
  });
  // Nothing has a name there, while a run goes on neither.
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_P(OffloadOnRanks, CheckpointsGoOnWithAndWithoutItOnOtherRanks) {
  const TemporaryFolder folder;
  for (const bool saves_outside : {true, false}) {
    Tensors saved, whole;
    const auto name = folder / concat("saved ", saves_outside);
    const auto train = [&](World& world, bool outside, int first, int last, bool resumes) {
      ShardedChain model(data_mesh(world), resumes ? 50 : 1, 2, kWidth,
                         stored_in(DType::kBFloat16));
      const auto optimizer = make_adamw(model.handle, adamw(0.01));
      if (outside) optimizer->offload({.folder = folder.path()});
      if (resumes) {
        step_by_name(model.handle, *optimizer, 77);  // what it had goes
        const auto buffers = optimizer->resident_bytes();
        HeldBytes held;
        EXPECT_EQ(load_checkpoint(model.handle, *optimizer, name).step, 2);
        if (outside) {
          EXPECT_EQ(optimizer->resident_bytes(), buffers);
          constexpr std::int64_t kMessages = 256;  // that ranks send each other
          EXPECT_LE(held.most(), largest_state(*optimizer) + kMessages) << "several at once";
        }
        expect_same(whole_state(model.handle, *optimizer), saved, "loaded");
      }
      for (int step = first; step <= last; ++step) step_by_name(model.handle, *optimizer, step);
      auto all = whole_state(model.handle, *optimizer);
      if (!resumes && last == 2) save_checkpoint(model.handle, *optimizer, name, last);
      return all;
    };
    ranks(GetParam()).run([&](World& world) {
      auto all = train(world, saves_outside, 1, 2, false);
      if (world.rank() == 0) saved = std::move(all);
    });
    ranks(1).run([&](World& world) { whole = train(world, false, 1, 4, false); });
    for (const int count : {1, 2, 3}) {
      ranks(count).run([&](World& world) {
        for (const bool outside : {true, false}) {
          expect_same(train(world, outside, 3, 4, true), whole,
                      concat("saved ", saves_outside, ", goes on ", outside, " on ", count));
        }
      });
    }
  }
}

TEST_P(OffloadOnRanks, StateDictsAreTheSame) {
  const TemporaryFolder folder;
  ranks(GetParam()).run([&](World& world) {
    const auto policy = stored_in(DType::kFloat16);
    ShardedChain inside(data_mesh(world), 1, 2, kWidth, policy);
    ShardedChain outside(data_mesh(world), 1, 2, kWidth, policy);
    const auto of_inside = make_adamw(inside.handle, adamw(0.01));
    const auto of_outside = make_adamw(outside.handle, adamw(0.01));
    of_outside->offload({.folder = folder.path(), .match = {"block0"}});
    for (int step = 1; step <= 2; ++step) {
      step_by_name(inside.handle, *of_inside, step);
      step_by_name(outside.handle, *of_outside, step);
    }
    const auto dict = optimizer_state_dict(inside.handle, *of_inside);
    expect_same(whole_state(outside.handle, *of_outside), whole_state(inside.handle, *of_inside));
    step_by_name(inside.handle, *of_inside, 3);
    const auto later = whole_state(inside.handle, *of_inside);
    // Back to where both were, the parameters too, by the state of the one.
    load_state_dict(inside.handle, state_dict(outside.handle, StateDictKind::kFull));
    load_optimizer_state_dict(inside.handle, *of_inside, dict);
    const auto before = of_outside->resident_bytes();
    load_optimizer_state_dict(outside.handle, *of_outside, dict);
    EXPECT_EQ(of_outside->resident_bytes(), before);
    step_by_name(inside.handle, *of_inside, 3);
    step_by_name(outside.handle, *of_outside, 3);
    expect_same(whole_state(inside.handle, *of_inside), later);
    expect_same(whole_state(outside.handle, *of_outside), later);
  });
}

TEST_P(OffloadOnRanks, FreezingAndMovingBackAndForthKeepBits) {
  const TemporaryFolder folder;
  ranks(GetParam()).run([&](World& world) {
    const auto run = [&](bool outside) {
      ShardedChain model(data_mesh(world), 1, 2, kWidth, stored_in(DType::kBFloat16));
      const auto optimizer = make_adamw(model.handle, adamw(0.01));
      if (outside) optimizer->offload({.folder = folder.path()});
      step_by_name(model.handle, *optimizer, 1);
      model.handle.zero_grad();
      set_trainable(model.handle, {{.match = {"block0"}, .trainable = false}}, {optimizer.get()});
      step_by_name(model.handle, *optimizer, 2);
      if (outside) optimizer->offload({.folder = folder.path(), .match = {"block1.b"}});
      step_by_name(model.handle, *optimizer, 3);
      model.handle.zero_grad();
      set_trainable(model.handle, {{.match = {"block0"}, .trainable = true}}, {optimizer.get()});
      step_by_name(model.handle, *optimizer, 4);
      if (outside) optimizer->offload({.folder = folder.path()});
      step_by_name(model.handle, *optimizer, 5);
      return whole_state(model.handle, *optimizer);
    };
    expect_same(run(true), run(false));
  });
}

TEST(Offload, AStepThatAScalerLeavesOutMovesNothing) {
  const TemporaryFolder folder;
  std::atomic<int> moves = 0;
  const test_hooks::Set counts(test_hooks::before_scratch_transfer,
                               [&](const std::string&, std::int64_t, bool) { ++moves; });
  ranks(2).run([&](World& world) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth, stored_in(DType::kFloat16));
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    optimizer->offload({.folder = folder.path()});
    step_by_name(model.handle, *optimizer, 1);
    GradScaler scaler(model.handle, {});
    comm::barrier(world.control(), "updated");
    moves = 0;
    comm::barrier(world.control(), "counted");
    EXPECT_FALSE(scaler.step(*optimizer, model.handle, INFINITY));
    EXPECT_EQ(moves, 0);
  });
}

TEST_P(OffloadOnRanks, PlansSayWhoseStateIsOut) {
  const TemporaryFolder folder;
  ranks(GetParam()).run([&](World& world) {
    constexpr std::int64_t kWide = 33;
    const auto make = [&] { return ShardedChain(data_mesh(world), 1, 3, kWide, in_bfloat16()); };
    auto inside = make();
    auto outside = make();
    const auto of_inside = make_adamw(inside.handle, adamw(0.01));
    const auto of_outside = make_adamw(outside.handle, adamw(0.01));
    const auto state = fsdp::sum_of(fsdp::state_of_units(outside.handle, *of_outside)).bytes;
    CompileOptions options;
    options.mode = CompileMode::kPlan;
    options.micro_batches = 2;
    options.offload_folder = folder.path();
    // The root and one block, the least that is gathered, and three quarters of all state.
    const auto units = fsdp::plan_units(outside.handle);
    options.memory_budget = units.at(0).bytes + units.at(1).bytes + state * 3 / 4;
    EXPECT_THAT(testing::error_of(ErrorKind::kConfig, [&] { compile(outside.handle, options); }),
                HasSubstr("offload_folder and no optimizer"));
    compile(outside.handle, options, of_outside.get());
    const auto step = [&](ShardedChain& model, Optimizer& optimizer, int number) {
      model.handle.zero_grad();
      StepScope scope(model.handle,
                      {.reshard = StepReshard::kMicroBatch, .schedule = "two", .micro_batches = 2});
      for (int k = 0; k < 2; ++k) {
        scope.begin_forward(0, k);
        const auto loss =
            squares(model.handle.forward(input_of(world.rank(), 2 * number + k, kWide))) / 64;
        scope.begin_backward(0, k);
        backward(loss);
      }
      scope.finish();
      optimizer.step();
    };
    for (int number = 0; number < 5; ++number) {
      // From the fourth on none is followed that offloads.
      if (number == 3) compile(outside.handle, {});
      step(inside, *of_inside, number);
      step(outside, *of_outside, number);
      const auto in_memory = of_inside->resident_bytes();
      if (number == 1 || number == 2) {  // the first one records
        EXPECT_LE(of_outside->resident_bytes(), state * 3 / 4);
        EXPECT_GT(of_outside->offload_traffic().bytes_written, 0);
      } else if (number > 2) {
        EXPECT_LE(in_memory, of_outside->resident_bytes()) << "and two buffers";
      }
      expect_same_list(all_of(outside.handle, *of_outside), all_of(inside.handle, *of_inside),
                       concat("step ", number));
    }
  });
}

// ------------------------------------------------------------------------------------- what fails

TEST(Offload, AFolderThatIsNoneEndsAllRanksNamingIt) {
  const TemporaryFolder folder;
  const auto file = folder.write("a file", "");
  for (const auto& path : {folder / "none", file}) {
    const auto errors = errors_of(3, [&](World& world) {
      ShardedChain model(data_mesh(world), 1, 1, kWidth);
      const auto optimizer = make_adamw(model.handle, adamw(0.01));
      // Others have one.
      const auto own = world.rank() == 1 ? path : folder.path();
      const auto error =
          testing::error_of(ErrorKind::kIo, [&] { optimizer->offload({.folder = own.native()}); });
      step_by_name(model.handle, *optimizer, 1);  // in memory, then
      throw Error(ErrorKind::kIo, error);
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr(path.native()), HasSubstr("rank 1"),
                                   HasSubstr("expected one"))));
  }
}

TEST(Offload, AFolderThatCannotBeWrittenToIsNamed) {
  if (::geteuid() == 0) {
    // Root writes anywhere but where the kernel makes the files.
    ranks(1).run([](World& world) {
      ShardedChain model(data_mesh(world), 1, 1, kWidth);
      const auto optimizer = make_adamw(model.handle, adamw(0.01));
      EXPECT_THAT(
          testing::error_of(ErrorKind::kIo, [&] { optimizer->offload({.folder = "/proc"}); }),
          AllOf(HasSubstr("/proc"), HasSubstr("rank 0"), HasSubstr("no file can be made")));
    });
    return;
  }
  const TemporaryFolder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
  ranks(1).run([&](World& world) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    EXPECT_THAT(
        testing::error_of(ErrorKind::kIo, [&] { optimizer->offload({.folder = folder.path()}); }),
        AllOf(HasSubstr(folder.path().native()), HasSubstr("no file can be made")));
  });
  fs::permissions(folder.path(), fs::perms::owner_all);
}

/// While it lives no file grows beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit lower{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &lower);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(Offload, ADiskWithoutRoomIsFoundBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  ranks(1).run([&](World& world) {
    const std::int64_t size = 1 << 16;
    auto model = fully_shard(std::make_shared<Scale>(seeded(3, {size})), data_mesh(world));
    const auto optimizer = make_adamw(model, adamw(0.01));
    step_by_name(model, *optimizer, 1);
    const auto before = all_of(model, *optimizer);
    {
      const FileSizeLimit limit(1 << 18);
      EXPECT_THAT(
          testing::error_of(ErrorKind::kIo, [&] { optimizer->offload({.folder = folder.path()}); }),
          AllOf(HasSubstr(folder.path().native()), HasSubstr("no room for 524288 bytes"),
                HasSubstr("rank 0")));
    }
    expect_same_list(all_of(model, *optimizer), before, "in memory, as before");
    optimizer->offload({.folder = folder.path()});  // now there is room
    EXPECT_EQ(optimizer->resident_bytes(), 0);
    expect_same_list(all_of(model, *optimizer), before, "offloaded");
  });
}

// A disk that fails in the midst of an update: some parameters have made it, so that nothing of
// this optimizer may be saved or gone on with, until a checkpoint is loaded.
TEST(Offload, AFailureInAnUpdateIsNamedAndLosesNoCheckpoint) {
  const TemporaryFolder folder;
  for (const bool reads : {true, false}) {
    std::atomic<bool> is_broken = false;
    const test_hooks::Set disk(test_hooks::before_scratch_transfer,
                               [&](const std::string& whose, std::int64_t, bool is_read) {
                                 TESSERA_CHECK(!is_broken || is_read != reads, ErrorKind::kIo,
                                               whose, ": the disk is broken");
                               });
    const auto name = folder / concat("saved ", reads);
    ranks(2).run([&](World& world) {
      const std::int64_t size = 4 * fsdp::kMasterPart;
      const auto make = [&] {
        return fully_shard(std::make_shared<Scale>(seeded(3, {size})), data_mesh(world));
      };
      auto model = make();
      const auto optimizer = make_adamw(model, adamw(0.01));
      optimizer->offload({.folder = folder.path()});
      step_by_name(model, *optimizer, 1);
      save_checkpoint(model, *optimizer, name, 1);
      step_by_name(model, *optimizer, 2);
      const auto expected = all_of(model, *optimizer);
      load_checkpoint(model, *optimizer, name);
      comm::barrier(world.control(), "loaded");
      is_broken = true;
      EXPECT_THAT(testing::error_of(ErrorKind::kIo, [&] { step_by_name(model, *optimizer, 2); }),
                  HasSubstr(concat("rank ", world.rank(), ": the disk is broken")));
      comm::barrier(world.control(), "failed");
      is_broken = false;
      for (const auto& refused :
           {std::function<void()>([&] { step_by_name(model, *optimizer, 2); }),
            std::function<void()>([&] { optimizer->state(); }), std::function<void()>([&] {
              save_checkpoint(model, *optimizer, folder / "torn", 2);
            })}) {
        EXPECT_THAT(testing::error_of(ErrorKind::kUsage, refused), HasSubstr("load a checkpoint"));
      }
      load_checkpoint(model, *optimizer, name);
      step_by_name(model, *optimizer, 2);
      expect_same_list(all_of(model, *optimizer), expected, "after the checkpoint was loaded");
    });
  }
}

// One rank's disk breaks, the others made the update: all begin anew from the checkpoint.
TEST(Offload, RanksRecoverFromOnesBrokenDisk) {
  const TemporaryFolder folder;
  std::atomic<bool> is_broken = false;
  const test_hooks::Set disk(test_hooks::before_scratch_transfer, [&](const std::string& whose,
                                                                      std::int64_t, bool) {
    TESSERA_CHECK(!is_broken || whose != "rank 1", ErrorKind::kIo, whose, ": the disk is broken");
  });
  ranks(3).run([&](World& world) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth, stored_in(DType::kBFloat16));
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    optimizer->offload({.folder = folder.path()});
    step_by_name(model.handle, *optimizer, 1);
    save_checkpoint(model.handle, *optimizer, folder / "saved", 1);
    step_by_name(model.handle, *optimizer, 2);
    const auto expected = all_of(model.handle, *optimizer);
    load_checkpoint(model.handle, *optimizer, folder / "saved");
    comm::barrier(world.control(), "loaded");
    is_broken = true;
    const auto error = error_of([&] {
      step_by_name(model.handle, *optimizer, 2);
      comm::barrier(world.control(), "end of the step");
    });
    if (world.rank() == 1) world.abort(error);  // as launch() does
    EXPECT_THAT(error, HasSubstr("rank 1: the disk is broken"));
    world.recover();
    is_broken = false;
    comm::barrier(world.control(), "mended");
    model.handle.zero_grad();
    load_checkpoint(model.handle, *optimizer, folder / "saved");
    step_by_name(model.handle, *optimizer, 2);
    expect_same_list(all_of(model.handle, *optimizer), expected, "after recovery");
  });
}

TEST(Offload, APatternThatMatchesNothingIsRefused) {
  ranks(1).run([](World& world) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    EXPECT_THAT(testing::error_of(ErrorKind::kContract,
                                  [&] { optimizer->offload({.folder = "/", .match = {"blok"}}); }),
                HasSubstr("\"blok\""));
  });
}

}  // namespace
}  // namespace tessera::test::offload_test
