// The plan of a step that is worked out from a configuration is the one that ranks follow: a real
// run records the same, has the same units, and holds no more than was predicted, to the byte.
#include "train/plan_of_step.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>
#include <torch/version.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text/byte_size.h"
#include "capture/plan_diff.h"
#include "capture/recompute_pass.h"
#include "capture/region_blocks.h"
#include "capture/replay/regions.h"
#include "capture/simulate_plan.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "fsdp/agreed/step_plan_check.h"
#include "fsdp/handle.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/test.h"
#include "tessera/group.h"
#include "tessera/optim.h"
#include "tessera/step_scope.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "unit/train/planned_run.h"
#include "unit/train/run_case.h"

namespace tessera::train::plan_of_step_test {
namespace {

struct StepCase {
  std::string name;
  std::string family = "qwen3";
  int ranks = 2;
  RecomputeMode mode = RecomputeMode::kNone;
  std::function<void(Config&)> change = {};
};
void PrintTo(const StepCase& c, std::ostream* out) { *out << c.name; }

/// The reference's model, wide enough that layers are no small buckets.
Config config_of(const StepCase& c, const TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  write_model(folder, c.family + "-fp32", widen);
  config.activation_checkpoint.mode = c.mode;
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 3 * c.ranks;
  if (c.family == "gemma4") config.model.freeze = {"model.vision_tower", "model.embed_vision"};
  if (c.change) c.change(config);
  return config;
}

/// Bytes that a micro-batch's forward leaves, and the most that is there until its backward has
/// ended.
struct Activations {
  std::int64_t kept = 0;
  std::int64_t peak = 0;
};

/// A rank that trains in step scopes of three micro-batches.
class Rank {
 public:
  Rank(const Config& config, const PlannedRun& run, World& world, std::int64_t positions = 16)
      : world_(world),
        positions_(positions),
        vocabulary_(run.source.spec.vocab_size),
        is_moe_(run.source.spec.moe.has_value()),
        model_(parallelize(run.source, config, world.mesh(mesh_shape(run.dims)))) {}

  Sharded<models::LanguageModel>& model() { return *model_; }

  void step(Sync sync = Sync::kLastMicroBatch) {
    StepScopeOptions options;
    options.reshard = StepReshard::kMicroBatch;
    options.sync_every_micro_batch = sync == Sync::kEveryMicroBatch;
    options.schedule = options.sync_every_micro_batch ? "three that reduce" : "three";
    options.micro_batches = kMicroBatches;
    StepScope scope(*model_, options);
    for (std::int64_t i = 0; i < kMicroBatches; ++i) {
      scope.begin_forward(0, i);
      models::ModelInputs inputs;
      const auto tokens = (at::arange(positions_, at::kLong) * (7 + i) + 3)
                              .remainder(vocabulary_ * 3 / 4 - 2)
                              .add(vocabulary_ / 4 + 2)
                              .view({1, positions_});
      inputs.input_ids = tokens;
      inputs.targets = tokens.clone();
      if (is_moe_) inputs.router_statistics = models::RouterStatistics::kCounts;
      before_forward();
      auto output = model_->call(&models::LanguageModel::forward_routed, inputs);
      after_forward(output);
      output.loads.clear();
      scope.begin_backward(0, i);
      output.result.backward(at::full_like(output.result, 1e-3));
    }
    scope.finish();
  }

  /// Steps whose gradients are not looked at.
  void settle(int steps = 1) {
    for (int i = 0; i < steps; ++i) {
      step();
      model_->zero_grad();
    }
  }

  /// The most of a step, at any allocation of it.
  struct Peak {
    std::int64_t gathered = 0;
    std::int64_t all = 0;  ///< tensors and pools
  };
  Peak peak_of_step(Sync sync = Sync::kLastMicroBatch) {
    Peak most;
    counted_.watch([&] {
      most.all = std::max(most.all, counted_.now() + capture::region_bytes(*model_).mapped);
      std::int64_t gathered = 0;
      for (const fsdp::Unit* unit : model_->unit()->runtime().units()) {
        if (!unit->gathered() && !unit->gather_pending()) continue;
        for (const auto& bucket : unit->buckets()) {
          if (!bucket->aliases_shard()) gathered += layout::gathered_bytes(bucket->plan());
        }
      }
      most.gathered = std::max(most.gathered, gathered);
    });
    step(sync);
    counted_.watch({});
    return most;
  }

  Activations activations_of_step() {
    found_.emplace();
    counted_.watch([this] { found_->peak = std::max(found_->peak, outside() - before_); });
    step();
    counted_.watch({});
    return *std::exchange(found_, std::nullopt);
  }

  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> found;
    for (const ShardView& view : model_->shards()) {
      if (view.shard.grad().defined()) found[view.contract->name] = view.shard.grad().clone();
    }
    return found;
  }

  static constexpr std::int64_t kMicroBatches = 3, kTokens = 16;

 private:
  std::int64_t outside() {
    return counted_.now() - model_->unit()->runtime().pool()->total_bytes();
  }
  // A rank that is still in the last exchange of the in-process backend holds what others sent.
  void before_forward() {
    if (!found_) return;
    world_.group().barrier("before a forward");
    before_ = outside();
    found_->peak = 0;
  }
  void after_forward(const models::ModelOutput& output) {
    if (!found_) return;
    world_.group().barrier("after a forward");
    found_->kept = outside() - before_ - static_cast<std::int64_t>(output.result.nbytes());
    for (const auto& load : output.loads) {
      found_->kept -= static_cast<std::int64_t>(load.counts.nbytes());
    }
  }

  World& world_;
  const std::int64_t positions_;
  const std::int64_t vocabulary_;
  const bool is_moe_;
  dry::MemoryCount counted_;
  std::optional<Activations> found_;  // where they are counted
  std::int64_t before_ = 0;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
};

class PlanOfStep : public ::testing::TestWithParam<StepCase> {};

TEST_P(PlanOfStep, ARunRecordsWhatWasPredicted) {
  const StepCase& c = GetParam();
  const TemporaryFolder folder;
  const Config config = config_of(c, folder);
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const auto eager = eager_choices(run, record);
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world);
    std::optional<fsdp::StepPlan> seen;
    fsdp::set_planner(rank.model(), [&](const auto& recorded, const auto& of, const auto& choices,
                                        fsdp::PlanOrder order) {
      seen = make_plan(recorded, of, choices, order);
      return *seen;
    });
    rank.settle(2);
    ASSERT_TRUE(seen);
    const auto predicted = make_plan(record, units, eager, fsdp::PlanOrder::kOneAfterTheOther);
    EXPECT_THAT(capture::diff(predicted, *seen), IsEmpty());
    EXPECT_EQ(predicted.hash(), seen->hash());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Runs, PlanOfStep,
    ::testing::Values(
        StepCase{"dense"}, StepCase{"one_rank", "qwen3", 1}, StepCase{"three_ranks", "llama", 3},
        StepCase{"full", "qwen3", 2, RecomputeMode::kFull},
        StepCase{"selective", "qwen3", 2, RecomputeMode::kSelective},
        StepCase{"experts", "qwen3-moe"}, StepCase{"images", "gemma4"},
        StepCase{"kept", "qwen3", 2, RecomputeMode::kNone,
                 [](Config& config) { config.parallelism.reshard_after_forward = false; }},
        StepCase{"frozen_front", "llama", 2, RecomputeMode::kNone,
                 [](Config& config) { config.model.freeze = {"model.embed_tokens", "layers.0"}; }},
        StepCase{"mixed", "qwen3", 2, RecomputeMode::kNone,
                 [](Config& config) { config.precision.param_dtype.dtype = DType::kBFloat16; }}),
    [](const auto& one) { return one.param.name; });

struct Asked {
  int form;
  std::int64_t more;  ///< bytes above the least; -1: no budget
};
constexpr Asked kAsked[] = {{1, -1}, {2, -1}, {3, 0}, {3, 100'000}, {3, 400'000}, {3, -1}};

// The share of all tensors and pools. Blocks of a pool may be larger than what they are taken for,
// and gradients of activations are not predicted: few compared with the parameters, of so few
// tokens.
constexpr double kShare = 0.03;

// In every form and budget the bytes that a real step has gathered at most are the predicted ones,
// and so is all that it holds, once a step has followed the plan; its gradients have the bits of an
// eager step that reduces as often (form 2 does with every micro-batch). Naive: the pool keeps for
// many steps what the first one took, which had no plan.
TEST(CompiledStep, HoldsWhatWasPredictedAndGivesTheSameBits) {
  dry::install_allocator();
  const TemporaryFolder folder;
  StepCase c{"dense"};
  Config config = config_of(c, folder);
  config.training.seq_len = Rank::kTokens;
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const auto least = capture::least_bytes({.record = record,
                                           .units = units,
                                           .eager = eager_choices(run, record),
                                           .profile = capture::default_profile(units)});
  on_ranks(c.ranks, [&](World& world) {
    std::map<Sync, std::map<std::string, at::Tensor>> expected;
    for (const auto sync : {Sync::kLastMicroBatch, Sync::kEveryMicroBatch}) {
      Rank eager(config, known, world);
      eager.step(sync);
      expected[sync] = eager.gradients();
    }
    for (const auto [form, more] : kAsked) {
      const auto about = concat("form ", form, ", ", more);
      auto changed = config;
      changed.compile.form = form;
      const RunOfPlan of_form = known.of(changed);
      const auto sync = form == 2 ? Sync::kEveryMicroBatch : Sync::kLastMicroBatch;
      CompileOptions options;
      options.mode = CompileMode::kPlan;
      options.form = form;
      options.micro_batches = Rank::kMicroBatches;
      if (more >= 0) options.memory_budget = least + more;
      Rank rank(config, known, world);  // with a pool of its own
      compile(rank.model(), options);
      for (int i = 0; i < 2; ++i) {
        rank.step(sync);
        rank.model().zero_grad();
      }
      const auto peak = rank.peak_of_step(sync);
      const auto plan =
          plan_step(capture::planning_of(options), record, units, eager_choices(of_form, record),
                    fsdp::PlanOrder::kOneAfterTheOther);
      const auto predicted = fsdp::peak_gathered_bytes(plan);
      EXPECT_EQ(peak.gathered, predicted) << about;
      if (more >= 0) {
        EXPECT_LE(peak.gathered, least + more) << about;
      }
      const PlanMemory memory = known.memory(changed);
      const auto activations = capture::most_activations(
          capture::activations_of(*memory.activations, units), record, plan.choices.recompute);
      const auto said = static_cast<double>(memory.others + activations + predicted);
      const auto held = static_cast<double>(peak.all);
      EXPECT_LE(held, (1 + kShare) * said) << about;
      // A plan that keeps more needs fewer blocks on hand.
      EXPECT_GE(held, (1 - 2 * kShare) * said) << about;
      const auto found = rank.gradients();
      ASSERT_EQ(found.size(), expected[sync].size()) << about;
      for (const auto& [name, gradient] : expected[sync]) {
        EXPECT_TRUE(gradient.equal(found.at(name))) << name << ", " << about;
      }
    }
  });
}

// As a file made before the run, with another budget: the run follows it; of another model, world
// or number of micro-batches it is refused before a step.
TEST(CompiledStep, FollowsAPlanOutOfAFileAndRefusesAnothers) {
  dry::install_allocator();
  const TemporaryFolder folder;
  StepCase c{"dense"};
  const Config config = config_of(c, folder);
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  capture::PlanFile file{made_for(run, TORCH_VERSION), {}, {}};
  auto choices = eager_choices(run, record);
  choices.keep[2] = fsdp::Keep::kUpdate;
  choices.ahead_in_forward = 2;
  file.plan = make_plan(record, plan_units(run), choices, fsdp::PlanOrder::kOneAfterTheOther);
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world);
    CompileOptions options{
        .mode = CompileMode::kPlan, .plan = to_json(file), .micro_batches = Rank::kMicroBatches};
    compile(rank.model(), options);
    rank.settle();
    EXPECT_EQ(rank.peak_of_step().gathered, fsdp::peak_gathered_bytes(file.plan));
    const auto refused = [&](const auto& change) -> std::string {
      auto other = file;
      change(other.made_for);
      options.plan = to_json(other);
      return refusal_of(ErrorKind::kConfig, [&] { compile(rank.model(), options); });
    };
    EXPECT_THAT(refused([](auto& made_for) { made_for.world = 3; }), Says("a world of 3"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.model = "1"; }), Says("hash 1"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.torch = "1.0"; }), Says("torch 1.0"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.micro_batches = 2; }),
                Says("micro-batches a step: 2"));
    EXPECT_EQ(refused([](auto&) {}), "");
  });
}

// -------------------------------------------------------------------------------------
// recomputation

constexpr std::int64_t kPositions = 64;

/// The configuration without a mode of recomputation.
Config config_of_rows(const StepCase& c, const TemporaryFolder& folder) {
  Config config = config_of(c, folder);
  config.activation_checkpoint.mode.reset();
  config.training.seq_len = kPositions;
  return config;
}

/// By unit, from one mode a layer.
std::vector<RecomputeMode> by_unit(const std::vector<fsdp::PlanUnit>& units,
                                   const std::vector<RecomputeMode>& layers) {
  std::vector<RecomputeMode> modes;
  std::size_t next = 0;
  for (const auto& unit : units) {
    const bool is_layer = unit.recompute_by != fsdp::RecomputeBy::kNone;
    modes.push_back(is_layer ? layers.at(next++) : RecomputeMode::kNone);
  }
  EXPECT_EQ(next, layers.size());
  return modes;
}

std::vector<std::vector<RecomputeMode>> mixed_modes() {
  using enum RecomputeMode;
  return {{kNone, kNone, kNone, kNone}, {kNone, kFull, kSelective, kNone},
          {kFull, kFull, kNone, kNone}, {kNone, kSelective, kNone, kFull},
          {kFull, kFull, kFull, kFull}, {kSelective, kSelective, kSelective, kSelective}};
}

class RecomputeByLayer : public ::testing::TestWithParam<StepCase> {};

// A plan out of a file, with another mode for each layer, gives the bits of a run that recomputes
// nothing, and the bytes that were predicted, as memory_table_test has them for one mode of all.
TEST_P(RecomputeByLayer, GivesTheSameBitsAndHoldsWhatWasPredicted) {
  dry::install_allocator();
  const TemporaryFolder folder;
  const StepCase& c = GetParam();
  const Config config = config_of_rows(c, folder);
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const PlanMemory memory = known.memory(config);
  const auto of_units = capture::activations_of(*memory.activations, units);
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world, kPositions);
    std::map<std::string, at::Tensor> expected;
    for (const auto& layers : mixed_modes()) {
      capture::PlanFile file{made_for(run, TORCH_VERSION), {}, {}};
      auto choices = eager_choices(run, record);
      choices.recompute = by_unit(units, layers);
      file.plan = make_plan(record, units, choices, fsdp::PlanOrder::kOneAfterTheOther);
      CompileOptions options{.mode = CompileMode::kPlan, .micro_batches = Rank::kMicroBatches};
      options.plan = to_json(file);
      compile(rank.model(), options);
      if (expected.empty()) {
        rank.settle();  // records
        rank.step();    // fills pools
      }
      rank.model().zero_grad();
      const auto found = rank.activations_of_step();
      const auto modes = by_unit(units, layers);
      std::int64_t kept = of_units.outside + of_units.after;
      for (std::size_t unit = 0; unit < modes.size(); ++unit) {
        kept += of_units.units[unit].kept(modes[unit]);
      }
      EXPECT_NEAR(static_cast<double>(found.kept), static_cast<double>(kept),
                  kShare * static_cast<double>(kept));
      const auto most = capture::most_activations(of_units, record, modes) + memory.passing;
      EXPECT_LE(static_cast<double>(found.peak), (1 + kShare) * static_cast<double>(most));
      EXPECT_GE(static_cast<double>(found.peak), 0.8 * static_cast<double>(most));
      const auto gradients = rank.gradients();
      if (expected.empty()) expected = gradients;
      ASSERT_EQ(gradients.size(), expected.size());
      for (const auto& [name, gradient] : expected) {
        EXPECT_TRUE(gradient.equal(gradients.at(name))) << name;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Families, RecomputeByLayer,
                         ::testing::Values(StepCase{"dense"}, StepCase{"experts", "qwen3-moe"},
                                           StepCase{"tied", "llama"}, StepCase{"gemma", "gemma4"}),
                         [](const auto& one) { return one.param.name; });

// Replayed regions keep in their blocks what autograd would keep: the blocks that a profile of one
// step tells of are those of another one, to the byte, and with them all tensors are predicted:
// what libtorch's allocator counts, and the blocks, which are the system's. Naive: a block of its
// own for each layer that is recomputed; scratch after the last layer that is not counted.
TEST(ReplayedStep, HoldsWhatItsProfileTellsAndNoMoreThanAnEagerOne) {
  dry::install_allocator();
  const TemporaryFolder folder;
  for (const auto mode : {RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective}) {
    SCOPED_TRACE(static_cast<int>(mode));
    StepCase c{"dense", "qwen3", 2, mode};
    Config config = config_of(c, folder);
    config.training.seq_len = kPositions;
    config.compile.mode = CompileChoice::kReplay;
    const PlannedRun known = planned_run(config, c.ranks);
    const RunOfPlan run = known.of(config);
    const auto record = step_record(run);
    const auto units = plan_units(run);
    const auto eager_of_run = eager_choices(run, record);
    on_ranks(c.ranks, [&](World& world) {
      Rank eager(config, known, world, kPositions);
      eager.settle(3);
      const auto measured = eager.peak_of_step();
      const auto expected = eager.gradients();

      Rank rank(config, known, world, kPositions);
      auto options = compile_options(run, known.memory(config), {});
      compile(rank.model(), options);
      rank.settle(3);
      const auto replayed_before = replay_calls(rank.model());
      capture::take_region_blocks(rank.model());
      rank.settle();
      auto profile = capture::default_profile(units);
      add_blocks(profile, capture::take_region_blocks(rank.model()), eager_of_run.recompute);
      options.profile = to_json(profile);
      const auto peak = rank.peak_of_step();
      const auto counted = capture::take_region_blocks(rank.model());
      const auto calls = replay_calls(rank.model()) - replayed_before;
      EXPECT_GT(calls.replayed, 0);
      EXPECT_EQ(calls.recorded, 0);

      const auto planning = capture::planning_of(options);
      const auto problem =
          problem_of(planning, record, units, eager_of_run, fsdp::PlanOrder::kOneAfterTheOther);
      const auto plan =
          plan_step(planning, record, units, eager_of_run, fsdp::PlanOrder::kOneAfterTheOther);
      const auto blocks = most_blocks(problem.profile, record, plan.choices.recompute);
      ASSERT_TRUE(blocks);
      EXPECT_EQ(counted.most, *blocks);
      EXPECT_GT(*blocks, 0);
      EXPECT_EQ(peak.gathered, fsdp::peak_gathered_bytes(plan));
      const auto said = known.memory(config).others + peak_bytes(problem, plan);
      EXPECT_NEAR(static_cast<double>(peak.all), static_cast<double>(said),
                  kShare * static_cast<double>(said));
      // Compared with an eager step there is what is idle of the blocks.
      std::int64_t in_use = 0;
      for (const auto& unit : problem.blocks) in_use += unit.entries;
      const auto idle = *blocks - (mode == RecomputeMode::kNone ? in_use : 0);
      EXPECT_LE(static_cast<double>(peak.all), 1.01 * static_cast<double>(measured.all + idle));
      for (const auto& [name, gradient] : rank.gradients()) {
        EXPECT_TRUE(gradient.equal(expected.at(name))) << name;
      }
    });
  }
}

// Budgets from the least of any plan to all: predicted and counted bytes of gathers and activations
// stay within them, more memory is never slower by the profile, and bits are those of an eager
// step.
TEST(RecomputeOfRun, BudgetsAreKeptAndBitsAreTheSame) {
  dry::install_allocator();
  const TemporaryFolder folder;
  StepCase c{"dense"};
  Config config = config_of_rows(c, folder);
  config.compile.mode = CompileChoice::kPlan;
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const auto eager = eager_choices(run, record);
  constexpr auto kOrder = fsdp::PlanOrder::kOneAfterTheOther;
  CompileOptions options = compile_options(run, known.memory(config), {});
  ASSERT_TRUE(options.activations);
  const auto problem = [&] {
    return problem_of(capture::planning_of(options), record, units, eager, kOrder);
  };
  const auto least = capture::least_bytes(problem());
  const auto all = capture::peak_bytes(problem(), make_plan(record, units, eager, kOrder));
  ASSERT_LT(least, all);
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world, kPositions);
    rank.settle();
    rank.step();
    const auto expected = rank.gradients();
    double before_ms = 0.0;
    for (int part = 0; part <= 4; ++part) {
      auto mine = options;
      mine.memory_budget = least + (all - least) * part / 4;
      compile(rank.model(), mine);
      rank.model().zero_grad();
      const auto found = rank.activations_of_step();
      const auto planning = capture::planning_of(mine);
      const auto plan = plan_step(planning, record, units, eager, kOrder);
      const auto of = problem_of(planning, record, units, eager, kOrder);
      EXPECT_EQ(fsdp::followed_recompute(rank.model()), plan.choices.recompute);
      EXPECT_LE(capture::peak_bytes(of, plan), *mine.memory_budget);
      constexpr std::int64_t kCounter = 64;  // of a message, which comes and goes
      EXPECT_LE(found.kept, *mine.memory_budget - fsdp::peak_gathered_bytes(plan) + kCounter);
      const auto again = std::ranges::count_if(
          plan.choices.recompute, [](auto mode) { return mode != RecomputeMode::kNone; });
      EXPECT_EQ(again > 0, part < 4) << again;
      const double ms = simulate(plan, of.profile, Rank::kMicroBatches).again_ms;
      EXPECT_TRUE(part == 0 || ms <= before_ms) << ms;
      before_ms = ms;
      for (const auto& [name, gradient] : rank.gradients()) {
        EXPECT_TRUE(gradient.equal(expected.at(name))) << name << part;
      }
    }
  });
}

// A key that a user set binds all layers: the pass has nothing to choose, and a plan of others is
// refused.
TEST(RecomputeOfRun, AKeyThatIsSetBinds) {
  const TemporaryFolder folder;
  StepCase c{"dense"};
  Config config = config_of_rows(c, folder);
  config.compile.mode = CompileChoice::kPlan;
  const PlannedRun free = planned_run(config, c.ranks);
  const RunOfPlan free_run = free.of(config);
  const auto record = step_record(free_run);
  capture::PlanFile file{made_for(free_run, TORCH_VERSION), {}, {}};
  file.plan = make_plan(record, plan_units(free_run), eager_choices(free_run, record),
                        fsdp::PlanOrder::kOneAfterTheOther);
  Config bound = config;
  bound.activation_checkpoint.mode = RecomputeMode::kFull;
  const RunOfPlan run = free.of(bound);
  const auto units = plan_units(run);
  const auto eager = eager_choices(run, record);
  auto options = compile_options(run, free.memory(bound), {});
  options.memory_budget = std::int64_t{1} << 40;
  const auto chosen = choose(problem_of(capture::planning_of(options), record, units, eager,
                                        fsdp::PlanOrder::kOneAfterTheOther));
  EXPECT_EQ(chosen.choices.recompute, eager.recompute);
  EXPECT_EQ(std::ranges::count(eager.recompute, RecomputeMode::kFull), 4);
  EXPECT_THAT(chosen.notes, Contains(Says("pass recompute is left out")));
  options.plan = to_json(file);
  const auto planning = capture::planning_of(options);
  EXPECT_REFUSED(kConfig,
                 plan_step(planning, record, units, eager, fsdp::PlanOrder::kOneAfterTheOther),
                 "recomputed by: user, plan");
}

TEST(CompileOfRun, BudgetBelowTheLeastGivesTheLeastOfAll) {
  const TemporaryFolder folder;
  StepCase c{"dense"};
  Config config = config_of(c, folder);
  config.compile.mode = CompileChoice::kPlan;
  config.compile.memory_budget = MemoryBudget{.bytes = 1000};
  const PlannedRun known = planned_run(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const PlanMemory held = known.memory(config);
  const auto text = error_of(ErrorKind::kConfig, [&] { compile_options(run, held, {}); });
  EXPECT_THAT(text, Says("compile.memory_budget: found 1000 bytes a rank",
                         concat(exact_size_text(held.state),
                                " of them optimizer state (tessera inspect --contract")));
  const std::int64_t least = std::stoll(text.substr(text.find("at least ") + 9));
  config.compile.memory_budget = MemoryBudget{.bytes = least};
  EXPECT_EQ(*compile_options(run, held, {}).memory_budget, least - held.others - held.state);
  config.compile.memory_budget = MemoryBudget{.share = 0.5};
  const MachineMemory machine{static_cast<double>(8 * least), 2};
  EXPECT_EQ(*compile_options(run, held, machine).memory_budget,
            2 * least - held.others - held.state);
}

// The forecast of a run's state and memory is what a run has.
TEST(CompileOfRun, OptimizerStateIsThatOfARun) {
  const TemporaryFolder folder;
  for (const auto storage : {DType::kFloat32, DType::kBFloat16}) {
    StepCase c{"dense", "qwen3", 3};
    Config config = config_of(c, folder);
    config.precision.storage_dtype.dtype = config.precision.param_dtype.dtype = storage;
    const PlannedRun known = planned_run(config, c.ranks);
    std::int64_t of_first = 0;
    on_ranks(c.ranks, [&](World& world) {
      Rank rank(config, known, world);
      const auto optimizer = make_adamw(rank.model(), {});
      rank.step();
      optimizer->step();
      std::int64_t bytes = 0;
      for (const auto& state : optimizer->state()) {
        for (const auto& kept : state.kept)
          bytes += static_cast<std::int64_t>(kept.values.nbytes());
      }
      if (world.rank() == 0) of_first = bytes;
    });
    EXPECT_EQ(of_first, known.memory(config).state);
  }
}

}  // namespace
}  // namespace tessera::train::plan_of_step_test
