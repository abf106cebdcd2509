// `tessera train` on devices: the numbers of the CPU, checkpoints that go from one to the other,
// and its messages where something ends (host waits: training_waits_test.cpp).
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <exception>
#include <filesystem>
#include <mutex>

#include "base/test_hooks.h"
#include "checkpoint/snapshot.h"
#include "comm/device.h"
#include "comm/host_read.h"
#include "comm/stream.h"
#include "dist/checkpoint_tensors.h"
#include "models/language_model.h"
#include "sim/in_place.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "sim/training_places.h"
#include "support/test.h"
#include "tessera/recompute.h"
#include "train/data/data.h"
#include "train/generate.h"
#include "train/planned_steps.h"
#include "unit/models/small_spec.h"

namespace tessera::sim::training_run_test {
namespace {

namespace fs = std::filesystem;
using comm::EventEnd;
using comm::EventSite;
using test::RanksOfRun;
using test::RunLosses;

const RanksOfRun kLayouts[] = {{1, 1}, {2, 1}, {4, 2}};

/// The CPU with the kernels that a device gets: the same numbers are the same bits then.
RunLosses train_with_kernels_of_devices(const RanksOfRun& layout, const train::Config& config,
                                        const TemporaryFolder& folder) {
  const test_hooks::Set as_there(test_hooks::kernels_of_devices, [] { return true; });
  return train_in({}, layout, config, folder);
}

// The order of sums depends on the layout, not on the streams.
TEST(TrainingRun, HasTheBitsOfTheCpuWithItsKernels) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::small_run(folder);
    config.precision.param_dtype.dtype = dtype;
    config.training.local_batch_size = 3;
    for (const auto& layout : kLayouts) {
      const auto expected = train_with_kernels_of_devices(layout, config, folder);
      for (const auto& where : kPlaces) {
        SCOPED_TRACE(concat(to_string(dtype), ", ", shown(where, layout)));
        const auto found = train_in(where, layout, config, folder);
        EXPECT_EQ(found.losses, expected.losses);
        ASSERT_EQ(expected.norms.size(), static_cast<std::size_t>(*config.training.steps));
        ASSERT_EQ(found.norms.size(), expected.norms.size());
        // Where a shard ends follows from the device's alignment: a norm adds other chunks.
        for (std::size_t i = 0; i < found.norms.size(); ++i) {
          EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-12 * expected.norms[i]);
        }
      }
    }
  }
}

// Other kernels: sums in other orders, rounded elsewhere.
TEST(TrainingRun, HasTheLossesOfTheCpu) {
  const TemporaryFolder folder;
  for (const auto& [dtype, tolerance] :
       {std::pair(DType::kFloat32, 1e-5), std::pair(DType::kBFloat16, 5e-3)}) {
    auto config = test::small_run(folder);
    config.precision.param_dtype.dtype = dtype;
    const auto expected = train_in({}, {}, config, folder);
    const auto found = train_in(kPlaces[0], {2, 1}, config, folder);
    ASSERT_EQ(expected.losses.size(), static_cast<std::size_t>(*config.training.steps));
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    ASSERT_EQ(found.norms.size(), found.losses.size());
    ASSERT_EQ(expected.norms.size(), found.losses.size());
    for (std::size_t i = 0; i < found.losses.size(); ++i) {
      EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * expected.losses[i]) << i;
      EXPECT_NEAR(found.norms[i], expected.norms[i], 10 * tolerance * expected.norms[i]) << i;
    }
  }
}

TEST(TrainingRun, OfEachKindHasTheLossesOfTheCpu) {
  const TemporaryFolder folder;
  for (const RunKind& kind : run_kinds()) {
    auto config = test::small_run(folder);
    config.training.steps = 5;
    kind.set(config, folder);
    const auto expected = train_in({}, {}, config, folder);
    for (const auto& [where, layout] :
         {std::pair(kPlaces[0], RanksOfRun{2, 1}), std::pair(kPlaces[1], RanksOfRun{4, 2})}) {
      SCOPED_TRACE(concat(kind.name, ", ", shown(where, layout)));
      const auto found = train_in(where, layout, config, folder);
      ASSERT_EQ(found.losses.size(), expected.losses.size());
      for (std::size_t i = 0; i < found.losses.size(); ++i) {
        EXPECT_NEAR(found.losses[i], expected.losses[i], kind.tolerance * expected.losses[i]) << i;
      }
      EXPECT_EQ(found.result.last_val_loss.has_value(), expected.result.last_val_loss.has_value());
      if (!expected.result.last_val_loss) continue;
      EXPECT_NEAR(*found.result.last_val_loss, *expected.result.last_val_loss, 1e-4);
    }
  }
}

// A device's parts are larger than any tensor of a test. These hold three rows of logits, and whole
// vectors of the kernels.
TEST(TrainingRun, InPartsHasTheBitsOfOneInWhole) {
  const TemporaryFolder folder;
  auto config = test::small_run(folder);
  config.training.steps = 4;
  config.precision.storage_dtype.dtype = DType::kBFloat16;
  config.precision.param_dtype.dtype = DType::kBFloat16;
  for (const auto& where : kPlaces) {
    const auto expected = train_in(where, {2, 1}, config, folder);
    const test_hooks::Set in_parts(test_hooks::elements_at_a_time, [] { return 1024; });
    const auto found = train_in(where, {2, 1}, config, folder);
    EXPECT_EQ(found.losses, expected.losses) << shown(where, {2, 1});
  }
}

void expect_same_tensors(const fs::path& found, const fs::path& expected) {
  const auto a = test::all_tensors(found);
  const auto b = test::all_tensors(expected);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b) {
    EXPECT_TRUE(a.contains(name) && a.at(name) == values) << name;
  }
}

// Each checkpoint is copied while the next steps are on their way.
TEST(TrainingRun, ResumesOnTheCpuFromACheckpointOfADeviceAndBackBitForBit) {
  const TemporaryFolder folder;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::with_steps(test::small_run(folder), 6);
    config.precision.storage_dtype.dtype = dtype;
    config.precision.param_dtype.dtype = dtype;
    config.checkpoint.interval = 2;
    for (const RanksOfRun& layout : {RanksOfRun{1, 1}, RanksOfRun{4, 2}}) {
      for (const auto& where : kPlaces) {
        SCOPED_TRACE(concat(to_string(dtype), ", ", shown(where, layout)));
        const auto name = concat(to_string(dtype), layout.ranks, where.device, where.side);
        const auto run = [&](const char* of) { return folder / concat(name, of); };
        const auto on_cpu = [&](const char* of, std::int64_t steps) {
          const test_hooks::Set as_there(test_hooks::kernels_of_devices, [] { return true; });
          test::train_on(layout, test::with_steps(config, steps), run(of));
        };
        const auto on_device = [&](const char* of, std::int64_t steps) {
          const In here(where);
          test::train_on(layout, test::with_steps(config, steps), run(of));
        };
        on_device("undisturbed", 6);
        on_device("to the CPU", 2);
        on_cpu("to the CPU", 6);
        on_cpu("from the CPU", 4);
        on_device("from the CPU", 6);
        for (const char* of : {"to the CPU", "from the CPU"}) {
          for (const char* step : {"checkpoint/step-2", "checkpoint/step-4", "checkpoint/step-6"}) {
            SCOPED_TRACE(concat(of, ", ", step));
            expect_same_tensors(run(of) / step, run("undisturbed") / step);
          }
        }
      }
    }
  }
}

/// Behind the first step.
void break_router(const ShardedBase& model, const std::string& name) {
  const at::NoGradGuard no_grad;
  for (const auto& view : model.shards()) {
    at::Tensor values = view.shard;
    if (view.contract->name == name) values.fill_(NAN);
  }
}

// The loss is not finite either: what is said is where it begins.
TEST(TrainingRun, ARouterThatIsNotFiniteIsNamedInTheStepThatItsRanksReadTogether) {
  const TemporaryFolder folder;
  for (const int stages : {1, 2}) {
    SCOPED_TRACE(concat(stages, " stage(s)"));
    auto config = experts_run(folder);
    config.parallelism.pipeline_parallel_degree = stages;
    const auto error = error_of(ErrorKind::kNumeric, [&] {
      train_in(kPlaces[0], {stages, 1}, config, folder, [](World&) {
        train::TrainingHooks hooks;
        hooks.after_step = [](const train::StepMetrics&, const ShardedBase& model) {
          break_router(model, "model.layers.1.mlp.gate.weight");
        };
        return hooks;
      });
    });
    EXPECT_THAT(error, Says("layers.1.mlp", "tokens with scores that are not finite"));
  }
}

// Layers on a device look at no value: what they would refuse is refused on the way there.
TEST(MicroBatchOnADevice, IsRefusedForWhatTheModelRefusesOnTheCpu) {
  const auto refused = [](const models::ModelSpec& spec, const train::MicroBatch& batch) {
    const auto model = models::make_language_model(spec);
    return error_of(ErrorKind::kFormat, [&] { batch.on(device(0), *model); });
  };
  models::ModelSpec spec = models::small(models::Family::kQwen3Moe);
  spec.moe = models::MoeSpec{.num_experts = 4, .experts_per_token = 2, .moe_intermediate_size = 8};
  const auto ids = [](std::vector<std::int64_t> values) {
    return at::tensor(values, at::kLong).view({1, -1});
  };
  train::MicroBatch batch{ids({1, 2}), ids({2, 3})};
  batch.imposed_routing = {at::tensor({0, 1, 3, 2}, at::kLong).view({2, 2}),
                           at::tensor({0, 1, 3, 3}, at::kLong).view({2, 2})};
  EXPECT_THAT(refused(spec, batch), Says("found an expert twice for one token"));
  batch.imposed_routing.pop_back();
  EXPECT_TRUE(batch.on(device(0), *models::make_language_model(spec)).input_ids.is_privateuseone());
  EXPECT_THAT(refused(spec, {ids({1, 128}), ids({2, 3})}), Says("the token 128"));
  EXPECT_THAT(refused(spec, {ids({1, 2}), ids({-1, 3})}), Says("the label -1"));

  models::ModelSpec gemma = models::small(models::Family::kGemma4);
  gemma.gemma4.emplace();
  gemma.gemma4->layers = {{.head_dim = 16, .num_key_value_heads = 2},
                          {.head_dim = 16, .num_key_value_heads = 2}};
  gemma.gemma4->image_token_id = 60;
  EXPECT_THAT(refused(gemma, {ids({1, 60}), ids({2, 3})}),
              Says("found image tokens (id 60) without pixel_values"));
  train::MicroBatch typed{ids({1, 2}), ids({2, 3})};
  typed.token_types = ids({0, 1});
  EXPECT_THAT(refused(gemma, typed), Says("mm_token_type_ids"));
}

// Naive: every stage of a pipeline brings up pictures, ids and labels that another one reads.
TEST(MicroBatchOnADevice, OfAPipelinesRankIsWhatItsStagesRead) {
  models::ModelSpec spec = models::small();
  spec.num_hidden_layers = 3;
  const auto ids = at::arange(12).view({2, 6});
  train::MicroBatch batch{ids, ids + 1};
  batch.images = models::Images{at::zeros({1, 4, 12}), at::zeros({1, 4, 2}, at::kLong)};
  batch.documents.starts = at::zeros({2, 6}, at::kLong);
  const auto of_stage = [&](const models::StageLayers& stage) {
    models::ModelAxes axes;
    axes.stages = {stage};
    return batch.on(device(0), *models::make_language_model(spec, axes));
  };
  for (const auto& [embeds, heads] :
       {std::pair(true, false), std::pair(false, false), std::pair(false, true)}) {
    const auto found = of_stage({embeds, {embeds ? 0 : 1, heads ? 3 : 2}, heads});
    EXPECT_EQ(found.input_ids.device(), device(0));
    EXPECT_EQ(found.input_ids.sizes(), ids.sizes());
    EXPECT_EQ(found.input_ids.storage().nbytes(), embeds ? 12 * sizeof(std::int64_t) : 8);
    EXPECT_TRUE(!embeds || at::equal(found.input_ids.cpu(), ids));
    EXPECT_EQ(found.images.has_value(), embeds);
    EXPECT_EQ(found.targets.is_cpu(), !heads);
    EXPECT_TRUE(at::equal(found.targets.cpu(), batch.targets));
    EXPECT_EQ(found.documents.starts.device(), device(0)) << "layers read them";
  }
}

TEST(TrainingRun, AProcessAloneHasItsDevice) {
  const TemporaryFolder folder;
  const auto config = test::with_steps(test::small_run(folder), 3);
  train_alone("sim", config, folder / "alone");
  const In here(kPlaces[0]);
  test::train_on({}, config, folder / "thread");
  expect_same_tensors(folder / "alone/checkpoint/step-3", folder / "thread/checkpoint/step-3");
}

// The copy is ordered after the step that made its values, and the next update after the copy.
// Without the copy's end the file's bytes are not waited for either: that is a fault of the host,
// and ends the process (faults_test.cpp).
TEST(TrainingRun, ACheckpointIsOrderedByEachOfItsEvents) {
  const TemporaryFolder folder;
  auto config = test::with_steps(test::small_run(folder), 3);
  config.checkpoint.interval = 1;
  int runs = 0;
  const auto race = [&]() -> std::string {
    try {
      train_alone("sim", config, folder / concat("run-", ++runs));
    } catch (const std::exception&) {  // the race, or what the saver makes of it
    }
    settle();
    const auto races = take_races();
    return races.empty() ? "" : races.front();
  };
  EXPECT_EQ(race(), "");
  for (const auto end : {EventEnd::kRecord, EventEnd::kBlock}) {
    const auto left_out = without(EventSite::kSnapshot, end);
    EXPECT_THAT(race(), Says("read reads on sim:0"));
  }
  const auto left_out = without(EventSite::kSnapshotEnd, EventEnd::kBlock);
  EXPECT_THAT(race(), Says("_fused_adamw_ writes"));
}

using TrainingRunDeathTest = ::testing::Test;

// Without its record nothing says when the file's bytes are there: its writer reads pinned memory
// early.
TEST(TrainingRunDeathTest, ACheckpointsEndIsFoundIfItIsNotRecorded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TemporaryFolder folder;
  auto config = test::with_steps(test::small_run(folder), 1);
  config.checkpoint.interval = 1;
  const auto run = [&] {
    const auto left_out = without(EventSite::kSnapshotEnd, EventEnd::kRecord);
    train_alone("sim", config, folder / "run");
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(134),
              "the host accesses pinned memory before a copy from the device has arrived");
}

checkpointing::StatePart part_of(const std::string& name, const at::Tensor& values) {
  checkpointing::StatePart part;
  part.name = name;
  part.shape = {values.numel()};
  part.box = TensorBox::whole(part.shape);
  part.elements = {0, values.numel()};
  part.values = values;
  return part;
}

/// The file of a few parts, taken twice: of few values, then of many.
std::string snapshot_of(const c10::Device& device, std::int64_t pinned_block) {
  checkpointing::Snapshot snapshot(pinned_block);
  for (const std::int64_t numel : {7, 1001}) {
    std::vector<checkpointing::StatePart> parts;
    std::uint64_t seed = 0;
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kLong}) {
      const at::Tensor values = drawn(++seed, {numel}).mul(100).to(dtype);
      parts.push_back(part_of(concat("model/", seed), values.to(device)));
    }
    parts.push_back(part_of("model/none", at::empty({0}, at::TensorOptions().device(device))));
    snapshot.take(parts, "rank_0.safetensors");
    comm::wait_on_host(snapshot.end(), "copy");
  }
  std::string file;
  for (const auto& bytes : snapshot.bytes()) {
    file.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  EXPECT_EQ(std::ssize(file), snapshot.size());
  return file;
}

// Naive: pinned memory in one piece, which libtorch rounds up to a power of two.
TEST(Snapshot, OfADeviceIsTheFileInPiecesOfABoundedSize) {
  const std::string expected = snapshot_of(c10::kCPU, 8);
  for (const std::int64_t block :
       {std::int64_t{64}, std::int64_t{1} << 10, std::int64_t{1} << 20}) {
    EXPECT_EQ(snapshot_of(device(0), block), expected) << block;
  }
}

// Copied tensors may be freed, and their memory be used again, once the copy has ended.
TEST(Snapshot, LetsGoOfWhatItReadsBehindTheCopy) {
  const auto race = [] {
    return race_of([] {
      checkpointing::Snapshot snapshot;
      snapshot.take({part_of("model/weight", at::ones({100}, on(0)))}, "rank_0.safetensors");
      snapshot.release();
      at::full({100}, 2.0, on(0));
    });
  };
  EXPECT_EQ(race(), "");
  const auto left_out = without(EventSite::kSnapshotEnd, EventEnd::kBlock);
  EXPECT_THAT(race(), Says("fill_"));
}

/// Returns the refusal of a run that has a little more memory each time, until it reaches its
/// steps.
std::string first_refusal_in_a_step(const train::Config& config, const fs::path& run) {
  for (auto bytes = static_cast<std::size_t>(live_bytes(0)) + 4096;; bytes += 4096) {
    const CapacityScope capacity(0, bytes);
    try {
      train_alone("sim", config, run);
      return "";  // it has room
    } catch (const Error& error) {
      const std::string said = error.what();
      // Else before anything was computed.
      if (said.starts_with("memory ran out before the first step of sim:0: requested ")) continue;
      if (said.find("whose ids and logits alone") == said.npos) return said;
    }
  }
}

TEST(TrainingRun, MemoryThatEndsNamesUnitRequestAndWhatIsHeld) {
  const TemporaryFolder folder;
  EXPECT_THAT(first_refusal_in_a_step(test::small_run(folder), folder / "run"),
              AllOf(StartsWith("training.local_batch_size: found micro-batches of 1 row"),
                    Says("memory ran out of sim:0 in the forward of unit "), Says(": requested "),
                    Says(", held "), Says(", peak ")));
}

/// No room on the device from the clipping of gradients on.
std::unique_ptr<at::ObserverContext> no_room_to_clip(const at::RecordFunction& scope) {
  struct Full final : at::ObserverContext {
    const CapacityScope capacity{0, static_cast<std::size_t>(live_bytes(0))};
  };
  if (std::string_view(scope.name()) != "tessera::optimizer") return nullptr;
  return std::make_unique<Full>();
}

// Gradients are there by then: norm and numbers need room of their own.
TEST(TrainingRun, MemoryThatEndsInClippingNamesTheKeyToo) {
  const TemporaryFolder folder;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&no_room_to_clip).scopes({at::RecordScope::USER_SCOPE}));
  std::string said;
  try {
    train_alone("sim", test::small_run(folder), folder / "run");
  } catch (const std::exception& error) {
    said = error.what();
  }
  at::removeCallback(handle);
  EXPECT_THAT(said, AllOf(StartsWith("training.local_batch_size: found"),
                          Says("memory ran out of sim:0"), Says(": requested ")));
}

TEST(TrainingRun, MetricsHaveThePeakOfTheDeviceThatHeldMost) {
  const TemporaryFolder folder;
  auto config = test::small_run(folder);
  config.training.steps = 2;
  std::vector<double> told;
  std::map<int, double> held;
  std::mutex mutex;
  train_in(kPlaces[0], {2, 1}, config, folder, [&](World& world) {
    train::TrainingHooks hooks;
    hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase&) {
      const std::scoped_lock lock(mutex);
      told.push_back(metrics.peak_device_mib.value_or(0.0));
      held[world.rank()] = static_cast<double>(comm::memory_of(world.device()).peak) / 0x1p20;
      EXPECT_TRUE(metrics.mfu && std::isnan(*metrics.mfu)) << "of a device that no table has";
    };
    return hooks;
  });
  ASSERT_EQ(told.size(), 4U);
  ASSERT_EQ(held.size(), 2U);
  EXPECT_DOUBLE_EQ(told.back(), std::max(held.at(0), held.at(1)));
  EXPECT_GT(told.back(), 0.0);
}

// Naive: of the host's memory, of which a device has nothing.
TEST(TrainingRun, AShareOfMemoryIsOfTheDeviceThatARankHas) {
  constexpr std::size_t kGiB = std::size_t{1} << 30;
  const CapacityScope large(0, 3 * kGiB), small(1, kGiB);
  on_ranks({2, "sim"}, [](World& world) {
    const train::MachineMemory least = train::least_memory(world);
    EXPECT_EQ(least.memory, 1.0 * kGiB);
    EXPECT_EQ(least.local_ranks, 1);
  });
  on_ranks({2, "sim:0"}, [](World& world) {
    const train::MachineMemory least = train::least_memory(world);
    EXPECT_EQ(least.memory, 3.0 * kGiB);
    EXPECT_EQ(least.local_ranks, 2);
  });
}

// Only to warn would leave flash attention's backward as it is: ATen asks it to be deterministic
// where it would throw otherwise.
TEST(TrainingRun, DeterministicIsDemandedAndNotOnlyWarnedOf) {
  const TemporaryFolder folder;
  auto config = test::with_steps(test::small_run(folder), 2);
  config.debug.deterministic = true;
  auto& context = at::globalContext();
  train_in({}, {}, config, folder);
  EXPECT_FALSE(context.deterministicAlgorithms()) << "the CPU's kernels are like that";
  train_in(kPlaces[0], {}, config, folder);
  EXPECT_TRUE(context.deterministicAlgorithms());
  EXPECT_FALSE(context.deterministicAlgorithmsWarnOnly());
  context.setDeterministicAlgorithms(false, false);
}

// The numbers themselves are the simulator's, which computes as soon as it is told.
TEST(TrainingRun, ProfileAndTraceAreOfTheDevicesStream) {
  const TemporaryFolder folder;
  auto config = test::small_run(folder);
  config.training.steps = 5;
  config.metrics.trace_steps = {3};
  const In here(kPlaces[1]);
  test::train_on({2, 1}, config, folder / "run", [](World&) {
    train::TrainingHooks hooks;
    hooks.profiling = train::Profiling::kYes;
    return hooks;
  });
  const std::string profile = read_file(folder / "run/profile.json");
  for (const char* part : {"\"products\"", "\"step_ms\"", "\"ms aten::mm\""}) {
    EXPECT_THAT(profile, Says(part));
  }
  EXPECT_THAT(profile, Not(Says(": 0.0,\n  \"other kernels\"")));
  const std::string trace = read_file(folder / "run/metrics/trace/step-3.json");
  for (const char* span : {"forward ", "backward ", "norm and clip", "step 3"}) {
    EXPECT_THAT(trace, Says(span));
  }
}

// Naive: what is drawn on the device is drawn differently again, and gradients have other numbers
// than results.
TEST(RecomputeOnADevice, DrawsTheSameNumbersAgainAndContinuesWhereItWas) {
  const AllowDraws allowed;
  const auto x = at::ones({256}, at::TensorOptions(device(0))).requires_grad_(true);
  const auto y =
      checkpoint([](const std::vector<at::Tensor>& in) { return at::dropout(in[0], 0.5, true); },
                 {x}, RecomputeMode::kFull);
  const auto state = [] {
    auto generator = at::globalContext().defaultGenerator(device(0));
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  };
  const auto before = state();
  torch::autograd::backward({y.sum()}, {});
  EXPECT_TRUE(at::equal(state(), before));
  EXPECT_TRUE(at::equal(x.grad().cpu(), y.detach().cpu()));
  EXPECT_NE(y.detach().cpu().sum().item<double>(), 512.0) << "nothing was dropped";
}

std::vector<std::int64_t> tokens_of(const std::string& device, const fs::path& checkpoint) {
  std::vector<std::int64_t> tokens;
  alone(device, [&](World& world) {
    train::Config config;
    config.model.path = checkpoint.string();
    config.precision.param_dtype = {};
    config.precision.storage_dtype = {};
    const auto source = train::open_model(config.model, {}, train::Purpose::kInference);
    const auto model = train::parallelize_to_generate(source, config, world);
    train::GenerateOptions options;
    options.max_new_tokens = 12;
    options.device = world.device();
    train::generate(train::decoder_of(*model), {108, 105, 110}, options,
                    [&](std::int64_t token) { tokens.push_back(token); });
  });
  return tokens;
}

// On one rank experts do not let the host wait for it: it is asked with the logits.
TEST(GenerateOnADevice, ARouterThatIsNotFiniteIsNamed) {
  const TemporaryFolder folder;
  auto config = test::with_steps(experts_run(folder), 1);
  config.precision.storage_dtype.dtype = DType::kBFloat16;
  train_alone("cpu", config, folder / "run");
  for (const char* where : {"cpu", "sim"}) {
    const auto error = error_of(ErrorKind::kNumeric, [&] {
      alone(where, [&](World& world) {
        train::Config of_generation;
        of_generation.model.path = (folder / "run/checkpoint/step-1").string();
        of_generation.precision.param_dtype = {};
        of_generation.precision.storage_dtype = {};
        const auto source = train::open_model(of_generation.model, {}, train::Purpose::kInference);
        const auto model = train::parallelize_to_generate(source, of_generation, world);
        {
          const at::NoGradGuard no_grad;
          auto parameters = model->module()->named_parameters();
          parameters["model.layers.1.mlp.gate.weight"].fill_(NAN);
        }
        train::GenerateOptions options;
        options.max_new_tokens = 4;
        options.device = world.device();
        train::generate(train::decoder_of(*model), {108, 105, 110}, options, [](std::int64_t) {});
      });
    });
    EXPECT_THAT(error, Says("scores that are not finite")) << where;
  }
}

TEST(GenerateOnADevice, WritesTheTokensOfTheCpu) {
  const TemporaryFolder folder;
  train_alone("cpu", test::with_steps(test::small_run(folder), 12), folder / "run");
  const auto checkpoint = folder / "run/checkpoint/step-12";
  const auto expected = tokens_of("cpu", checkpoint);
  EXPECT_EQ(expected.size(), 12U);
  EXPECT_EQ(tokens_of("sim", checkpoint), expected);
}

}  // namespace
}  // namespace tessera::sim::training_run_test
