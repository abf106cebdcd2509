// The plan of a step that is worked out from a configuration is the one that ranks follow: a real
// run records the same, has the same units, and holds no more than was predicted, to the byte.
#include "train/plan_of_step.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "capture/plan_diff.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "fsdp/handle.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/step_scope.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/plan_of_run.h"
#include "unit/train/counted_bytes.h"
#include "unit/train/run_case.h"

namespace tessera::train::plan_of_step_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct StepCase {
  std::string name;
  std::string family = "qwen3";
  int ranks = 2;
  RecomputeMode mode = RecomputeMode::kNone;
  std::function<void(Config&)> change = {};
};
void PrintTo(const StepCase& c, std::ostream* out) { *out << c.name; }

/// The reference's model, wide enough that layers are no small buckets.
Config config_of(const StepCase& c, const testing::TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + c.family + "-fp32/config.json");
  auto model = nlohmann::json::parse(in);
  auto& text = model.contains("text_config") ? model["text_config"] : model;
  text["hidden_size"] = 128;
  text["intermediate_size"] = 192;
  text["vocab_size"] = 512;
  if (text.contains("moe_intermediate_size")) text["moe_intermediate_size"] = 96;
  if (c.family == "gemma4") text["vocab_size_per_layer_input"] = 512;
  folder.write("model.json", model.dump());
  config.activation_checkpoint.mode = c.mode;
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 3 * c.ranks;
  if (c.family == "gemma4") config.model.freeze = {"model.vision_tower", "model.embed_vision"};
  if (c.change) c.change(config);
  return config;
}

/// What there is of a run before it starts.
struct Before {
  ModelSource source;
  ParallelDims dims;
  ModelContract contract;
  layout::ModelPlan plan;
  RunOfPlan of(const Config& config) const {
    return {config,
            source.spec,
            source.description,
            dims,
            contract,
            plan,
            aux_loss_coef(config.model.aux_loss_coef, source.spec)};
  }
};
Before before(const Config& config, int ranks) {
  Before found{open_model(config.model), resolve_parallelism(config.parallelism, ranks), {}, {}};
  found.contract = resolve_model(found.source, config, found.dims);
  found.plan =
      plan_model(found.source.description, found.contract.parameters, mesh_shape(found.dims));
  return found;
}

/// A rank that trains in step scopes of three micro-batches.
class Rank {
 public:
  Rank(const Config& config, const Before& run, World& world)
      : vocabulary_(run.source.spec.vocab_size),
        is_moe_(run.source.spec.moe.has_value()),
        model_(parallelize(run.source, config, world.mesh(mesh_shape(run.dims)))) {}

  Sharded<models::LanguageModel>& model() { return *model_; }

  void step() {
    StepScope scope(
        *model_,
        {.reshard = StepReshard::kMicroBatch, .schedule = "three", .micro_batches = kMicroBatches});
    for (std::int64_t i = 0; i < kMicroBatches; ++i) {
      scope.begin_forward(0, i);
      models::ModelInputs inputs;
      const auto tokens = (at::arange(16, at::kLong) * (7 + i) + 3)
                              .remainder(vocabulary_ * 3 / 4 - 2)
                              .add(vocabulary_ / 4 + 2)
                              .view({1, 16});
      inputs.input_ids = tokens;
      inputs.targets = tokens.clone();
      if (is_moe_) inputs.router_statistics = models::RouterStatistics::kCounts;
      auto output = model_->call(&models::LanguageModel::forward_routed, inputs);
      scope.begin_backward(0, i);
      output.result.backward(at::full_like(output.result, 1e-3));
    }
    scope.finish();
  }

  /// The most that is gathered at any allocation of a step.
  std::int64_t peak_of_step() {
    std::int64_t most = 0;
    counted_.watch([&] {
      std::int64_t gathered = 0;
      for (const fsdp::Unit* unit : model_->unit()->runtime().units()) {
        if (!unit->gathered() && !unit->gather_pending()) continue;
        for (const auto& bucket : unit->buckets()) {
          if (!bucket->aliases_shard()) gathered += layout::gathered_bytes(bucket->plan());
        }
      }
      most = std::max(most, gathered);
    });
    step();
    counted_.watch({});
    return most;
  }

  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> found;
    for (const ShardView& view : model_->shards()) {
      if (view.shard.grad().defined()) found[view.contract->name] = view.shard.grad().clone();
    }
    return found;
  }

  static constexpr std::int64_t kMicroBatches = 3;

 private:
  const std::int64_t vocabulary_;
  const bool is_moe_;
  CountedBytes counted_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
};

class PlanOfStep : public ::testing::TestWithParam<StepCase> {};

TEST_P(PlanOfStep, ARunRecordsWhatWasPredicted) {
  const StepCase& c = GetParam();
  const testing::TemporaryFolder folder;
  const Config config = config_of(c, folder);
  const Before known = before(config, c.ranks);
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
    for (int i = 0; i < 2; ++i) {
      rank.step();
      rank.model().zero_grad();
    }
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

// Of forms and budgets: the bytes that a real step has gathered at most are the predicted ones, and
// its gradients have the bits of an eager step (form 2 adds in another order).
TEST(CompiledStep, HoldsWhatWasPredictedAndGivesTheSameBits) {
  CountingAllocator::install();
  const testing::TemporaryFolder folder;
  StepCase c{"dense"};
  const Config config = config_of(c, folder);
  const Before known = before(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  const auto units = plan_units(run);
  const auto eager = eager_choices(run, record);
  constexpr auto kOrder = fsdp::PlanOrder::kOneAfterTheOther;
  const auto least = capture::least_bytes({.record = record,
                                           .units = units,
                                           .eager = eager,
                                           .profile = capture::default_profile(units)});
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world);
    rank.step();
    rank.model().zero_grad();
    rank.step();
    const auto expected = rank.gradients();
    for (const int form : {1, 3}) {
      for (const std::int64_t more : {0L, 100'000L, 400'000L, -1L}) {
        if (form == 1 && more >= 0) continue;
        CompileOptions options;
        options.mode = CompileMode::kPlan;
        options.form = form;
        options.micro_batches = Rank::kMicroBatches;
        if (more >= 0) options.memory_budget = least + more;
        compile(rank.model(), options);
        rank.model().zero_grad();
        const auto peak = rank.peak_of_step();
        const auto plan = plan_step(capture::planning_of(options), record, units, eager, kOrder);
        EXPECT_EQ(peak, fsdp::peak_gathered_bytes(plan)) << form << " " << more;
        if (more >= 0) {
          EXPECT_LE(peak, least + more);
        }
        const auto found = rank.gradients();
        ASSERT_EQ(found.size(), expected.size());
        for (const auto& [name, gradient] : expected) {
          EXPECT_TRUE(gradient.equal(found.at(name))) << name << " " << form << " " << more;
        }
      }
    }
  });
}

// As a file made before the run, with another budget: the run follows it; of another model, world
// or number of micro-batches it is refused before a step.
TEST(CompiledStep, FollowsAPlanOutOfAFileAndRefusesAnothers) {
  CountingAllocator::install();
  const testing::TemporaryFolder folder;
  StepCase c{"dense"};
  const Config config = config_of(c, folder);
  const Before known = before(config, c.ranks);
  const RunOfPlan run = known.of(config);
  const auto record = step_record(run);
  capture::PlanFile file{made_for(run, TORCH_VERSION), {}, {}};
  auto choices = eager_choices(run, record);
  choices.keep[2] = fsdp::Keep::kUpdate;
  choices.ahead_in_forward = 2;
  file.plan = make_plan(record, plan_units(run), choices, fsdp::PlanOrder::kOneAfterTheOther);
  on_ranks(c.ranks, [&](World& world) {
    Rank rank(config, known, world);
    CompileOptions options;
    options.mode = CompileMode::kPlan;
    options.micro_batches = Rank::kMicroBatches;
    options.plan = to_json(file);
    compile(rank.model(), options);
    rank.step();
    rank.model().zero_grad();
    EXPECT_EQ(rank.peak_of_step(), fsdp::peak_gathered_bytes(file.plan));
    const auto refused = [&](const auto& change) -> std::string {
      auto other = file;
      change(other.made_for);
      options.plan = to_json(other);
      try {
        compile(rank.model(), options);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kConfig);
        return error.what();
      }
      return "";
    };
    EXPECT_THAT(refused([](auto& made_for) { made_for.world = 3; }), HasSubstr("a world of 3"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.model = "1"; }), HasSubstr("hash 1"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.torch = "1.0"; }), HasSubstr("torch 1.0"));
    EXPECT_THAT(refused([](auto& made_for) { made_for.micro_batches = 2; }),
                HasSubstr("micro-batches a step: 2"));
    EXPECT_EQ(refused([](auto&) {}), "");
  });
}

TEST(CompileOfRun, BudgetBelowTheLeastGivesTheLeastOfAll) {
  const testing::TemporaryFolder folder;
  StepCase c{"dense"};
  Config config = config_of(c, folder);
  config.compile.mode = CompileChoice::kPlan;
  config.compile.memory_budget = MemoryBudget{.bytes = 1000};
  const Before known = before(config, c.ranks);
  const RunOfPlan run = known.of(config);
  std::int64_t least = 0;
  try {
    compile_options(run, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    const std::string text = error.what();
    EXPECT_THAT(text, HasSubstr("compile.memory_budget: found 1000 bytes a rank"));
    least = std::stoll(text.substr(text.find("at least ") + 9));
  }
  config.compile.memory_budget = MemoryBudget{.bytes = least};
  const auto held = held_bytes(run);
  EXPECT_EQ(*compile_options(run, {}).memory_budget, least - held.others - held.state);
  config.compile.memory_budget = MemoryBudget{.share = 0.5};
  const MachineMemory machine{static_cast<double>(8 * least), 2};
  EXPECT_EQ(*compile_options(run, machine).memory_budget, 2 * least - held.others - held.state);
  // Where optimizer state may be offloaded less is needed, and the budget is of it, too.
  config.compile.offload_folder = "out";
  EXPECT_EQ(*compile_options(run, machine).memory_budget, 2 * least - held.others);
  config.compile.memory_budget = MemoryBudget{.bytes = 1000};
  EXPECT_THAT(testing::error_of(ErrorKind::kConfig, [&] { compile_options(run, {}); }),
              HasSubstr("beside optimizer state"));
}

// What is told before a run of state and memory is what a run has.
TEST(CompileOfRun, StateOfUnitsIsThatOfARun) {
  const testing::TemporaryFolder folder;
  for (const auto storage : {DType::kFloat32, DType::kBFloat16}) {
    StepCase c{"dense", "qwen3", 3};
    Config config = config_of(c, folder);
    config.precision.storage_dtype.dtype = config.precision.param_dtype.dtype = storage;
    const Before known = before(config, c.ranks);
    const RunOfPlan run = known.of(config);
    const auto predicted = fsdp::state_of_units(run.plan, run.contract.parameters, 2);
    on_ranks(c.ranks, [&](World& world) {
      Rank rank(config, known, world);
      const auto optimizer = make_adamw(rank.model(), {});
      EXPECT_EQ(fsdp::state_of_units(rank.model(), *optimizer), predicted);
      rank.step();
      optimizer->step();
      const auto whole = optimizer->resident_bytes();
      EXPECT_LE(whole, held_bytes(run).state);
      EXPECT_LE(held_bytes(run).state, fsdp::sum_of(predicted).bytes);
      optimizer->offload({.folder = folder.path()});
      rank.model().zero_grad();
      rank.step();
      optimizer->step();
      // No more than the forecast: a rank may have less than the one that has most.
      EXPECT_LE(optimizer->resident_bytes(), fsdp::buffer_bytes(fsdp::sum_of(predicted)));
      EXPECT_GT(optimizer->resident_bytes(), 0);
    });
  }
}

}  // namespace
}  // namespace tessera::train::plan_of_step_test
