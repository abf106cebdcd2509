// What the micro-batches of a rank keep over the slots of a schedule, beside the simulator: real
// steps of a pipeline on ranks as threads, whose memory is counted after each action.
//
// Counted is all that the rank's thread has taken since the step's first action and still has:
// what autograd saves between F and I or B, what W waits for, received tensors that either keeps.
// Not counted is what the messages' row of the table has: receives that are posted for later
// actions, results that have not left, copies of the in-process transport. Gathered parameters and
// gradients lie in memory of the steps before.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <variant>

#include "base/test_hooks.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "models/keeps/kept_activations.h"
#include "pipeline/borders.h"
#include "pipeline/program.h"
#include "pipeline/simulate.h"
#include "support/test.h"
#include "train/data/data.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/pipeline/pipeline_step.h"
#include "train/plan_of_run.h"
#include "train/step_rates.h"
#include "unit/train/planned_run.h"
#include "unit/train/run_case.h"

namespace tessera::train::live_bytes_test {
namespace {

using pipeline::Action;
using pipeline::HandOver;
using pipeline::Transfer;

constexpr int kRanks = 2;
constexpr int kMicroBatches = 6;
constexpr std::int64_t kRows = 2;
constexpr std::int64_t kPositions = 64;

struct LiveCase {
  std::string schedule;
  RecomputeMode mode = RecomputeMode::kNone;
  DType compute = DType::kFloat32;
};
std::string name_of(const LiveCase& c) {
  const char* mode = c.mode == RecomputeMode::kNone   ? ""
                     : c.mode == RecomputeMode::kFull ? "_full"
                                                      : "_selective";
  return c.schedule + mode + (c.compute == DType::kBFloat16 ? "_bf16" : "");
}
void PrintTo(const LiveCase& c, std::ostream* out) { *out << name_of(c); }

Config config_of(const LiveCase& c, const TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  std::ifstream in(folder / "model.json");
  auto model = nlohmann::json::parse(in);
  model["num_hidden_layers"] = 8;
  model["max_position_embeddings"] = kPositions;
  folder.write("model.json", model.dump());
  config.parallelism.pipeline_parallel_degree = kRanks;
  config.pipeline.schedule = c.schedule;
  config.precision.param_dtype.dtype = c.compute;
  config.activation_checkpoint.mode = c.mode;
  config.training.seq_len = kPositions;
  config.training.local_batch_size = kRows;
  config.training.global_batch_size = kRows * kMicroBatches;
  return config;
}

models::KeptActivations kept_by(const PipelinePlan& plan, int stage, const models::ModelSpec& spec,
                                const ParallelDims& dims, const ModelContract& contract) {
  return models::kept_activations({.spec = spec,
                                   .degrees = dims,
                                   .parameters = contract.parameters,
                                   .rows = kRows,
                                   .positions = kPositions,
                                   .stage = stage_layers(plan, stage)});
}

/// What of a rank's memory belongs to messages, by the list that it runs.
class OnTheirWay {
 public:
  OnTheirWay(const pipeline::Schedule& schedule, int rank, std::int64_t bytes)
      : schedule_(schedule),
        steps_(pipeline::lower(schedule).steps.at(static_cast<std::size_t>(rank))),
        bytes_(bytes) {}

  void begin(const Action& action) {
    while (!is_in_slot(action)) advance();
    action_ = action;
  }
  void end() {
    const int stages = schedule_.stages();
    if (const auto needed = needed_by(action_, stages)) waiting_.erase(*needed);
    if (const auto given = given_by(action_, stages)) {
      (is_message(*given, schedule_) ? leaving_ : waiting_).insert(*given);
    }
  }
  std::int64_t bytes() const {
    return static_cast<std::int64_t>(leaving_.size() + waiting_.size()) * bytes_;
  }

 private:
  bool is_in_slot(const Action& action) const {
    if (next_ == 0) return false;
    const auto* slot = std::get_if<pipeline::Slot>(&steps_.at(next_ - 1));
    return slot != nullptr && (slot->action == action || slot->beside == action);
  }
  void advance() {
    const pipeline::Step& step = steps_.at(next_++);
    if (const auto* transfer = std::get_if<Transfer>(&step)) {
      if (transfer->end == Transfer::End::kReceive) waiting_.insert(transfer->what);
    } else if (std::holds_alternative<pipeline::Slot>(step)) {
      // The runner lets go of them before a slot, once they are worth asking for.
      const auto held = leaving_.size();
      if (pipeline::Messages::are_worth_asking(held, held * static_cast<std::size_t>(bytes_))) {
        leaving_.clear();
      }
    }
  }

  const pipeline::Schedule& schedule_;
  const std::vector<pipeline::Step> steps_;
  const std::int64_t bytes_;
  std::size_t next_ = 0;
  Action action_;
  std::set<HandOver> leaving_;  ///< made here, and held until they are through
  std::set<HandOver> waiting_;  ///< posted, or handed over on this rank, for actions to come
};

struct Counted {
  std::int64_t peak = 0;
  std::int64_t at_end = 0;
  std::int64_t pool_growth = 0;
  int actions = 0;
  std::string course;  ///< for a failure: each action with the bytes after it
};

class Rank {
 public:
  Rank(const Config& config, const ModelSource& source, const PipelinePlan& plan, World& world)
      : plan_(plan), spec_(source.spec) {
    const auto dims = resolve_parallelism(config.parallelism, world.size());
    const auto mesh = world.mesh(mesh_shape(dims));
    rank_ = mesh.coordinate(axis::kPipeline);
    auto parts = model_parts(source, config, mesh, Purpose::kTraining, &plan);
    stream_ = kept_by(plan, 0, spec_, dims, parts.contract).stream;
    const auto borders = stream_borders(plan, dims, source.description, parts.contract);
    model_ = parallelize(std::move(parts), source, config, mesh);
    pipeline_.emplace(plan, borders, *model_);
  }

  Counted run() {
    step();  // records, and fills the pool
    step();
    dry::MemoryCount counted;
    const std::int64_t pool = pool_bytes();
    OnTheirWay messages(plan_.schedule, rank_, stream_);
    Counted found;
    std::optional<std::int64_t> before;
    std::string name;
    {
      const test_hooks::Set looks(test_hooks::computing, [&](const Action* action) {
        if (action != nullptr) {
          name = to_string(*action);
          messages.begin(*action);
          if (!before) before = counted.now() - messages.bytes();
          return;
        }
        messages.end();
        found.at_end = counted.now() - *before - messages.bytes();
        found.peak = std::max(found.peak, found.at_end);
        found.course += concat(name, " ", found.at_end, "; ");
        ++found.actions;
      });
      step();
    }
    found.pool_growth = pool_bytes() - pool;
    return found;
  }

 private:
  std::int64_t pool_bytes() { return model_->unit()->runtime().pool()->total_bytes(); }

  void step() {
    StepOfStages step;
    step.step = ++steps_;
    for (int i = 0; i < kMicroBatches; ++i) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(i));
      const at::Tensor tokens =
          at::randint(spec_.vocab_size, {kRows, kPositions}, generator, at::kLong);
      step.batches.push_back({tokens, tokens.clone()});
      step.rows.push_back({i * kRows, (i + 1) * kRows});
    }
    step.kept = kMicroBatches * kRows * kPositions;
    pipeline_->forward_backward(step);
  }

  const PipelinePlan& plan_;
  const models::ModelSpec& spec_;
  int rank_ = 0;
  std::int64_t stream_ = 0;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::optional<PipelineOfRun> pipeline_;
  std::int64_t steps_ = 0;
};

class LiveBytes : public ::testing::TestWithParam<LiveCase> {};

// Naive: counted by micro-batches, as if stages were equal and W kept nothing.
TEST_P(LiveBytes, AreWhatTheSimulatorSays) {
  const LiveCase& c = GetParam();
  const TemporaryFolder folder;
  const Config config = config_of(c, folder);
  const ModelSource source = open_model(config.model, config.lora);
  const ParallelDims dims = resolve_parallelism(config.parallelism, kRanks);
  const ModelContract contract = resolve_model(source, config, dims);
  const PipelinePlan plan =
      *resolve_pipeline(config, dims, source.spec, source.description,
                        {.micro_batches = kMicroBatches, .row_tokens = kPositions});
  pipeline::Costs costs(static_cast<std::size_t>(plan.schedule.stages()));
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    const auto kept = kept_by(plan, static_cast<int>(stage), source.spec, dims, contract);
    costs[stage].live_bytes = static_cast<double>(kept.in(c.mode).kept);
    costs[stage].deferred_bytes = static_cast<double>(kept.deferred);
  }
  const pipeline::Simulated said = simulate(plan.schedule, costs);

  dry::install_allocator();
  // A send's copy is the transport's, so that what a rank holds does not depend on when others run.
  const test_hooks::Set buffered(test_hooks::buffered_messages, [] {
    dry::MemoryCount::skip_next();
    return true;
  });
  std::vector<Counted> found(kRanks);
  on_ranks(kRanks, [&](World& world) {
    found[static_cast<std::size_t>(world.rank())] = Rank(config, source, plan, world).run();
  });
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    const Counted& one = found[rank];
    EXPECT_GT(one.actions, 2 * kMicroBatches - 1) << "rank " << rank;
    EXPECT_EQ(one.pool_growth, 0) << "rank " << rank;
    // 5 %: what the issue asks for. What is not predicted are scalars, counters and masks.
    const double peak = said.ranks[rank].peak_bytes;
    EXPECT_NEAR(static_cast<double>(one.peak), peak, 0.05 * peak)
        << "rank " << rank << ": " << one.course;
    EXPECT_LE(one.at_end, 0.01 * peak) << "rank " << rank << ": " << one.course;
  }
}

std::vector<LiveCase> cases() {
  std::vector<LiveCase> all;
  for (const char* schedule : {"1F1B", "ZBV", "DualPipeV"}) {
    all.push_back({schedule});
    all.push_back({schedule, RecomputeMode::kNone, DType::kBFloat16});
    all.push_back({schedule, RecomputeMode::kFull, DType::kBFloat16});
    all.push_back({schedule, RecomputeMode::kSelective});
  }
  return all;
}
std::string test_name(const ::testing::TestParamInfo<LiveCase>& one) {
  const std::string name = name_of(one.param);
  return name.starts_with("1") ? "OneF" + name.substr(2) : name;
}
INSTANTIATE_TEST_SUITE_P(OfRuns, LiveBytes, ::testing::ValuesIn(cases()), test_name);

// The operations that a rank computes in a step: the sums of a model by hand, and beside those of its layers, drawn.

// run_case's model, of a token and a forward: products, and attention to 8.5 of 16 positions.
constexpr double kUpProj = 2.0 * 192 * 128;
constexpr double kLayerProducts =
    2.0 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 2 * 128 + 2 * 32) + 3 * kUpProj;
constexpr double kAttention = 2.0 * 4 * (32 + 32) * 8.5;
constexpr double kHead = 2.0 * (260 * 128 + 128);
constexpr double kForward = 3 * (kLayerProducts + kAttention) + kHead;

StepFlops flops_of(const Config& config, int ranks) {
  const PlannedRun known = planned_run(config, ranks);
  const RunOfPlan run = known.of(config);
  return *step_flops(run, plan_of_steps(run, {}));
}

TEST(StepFlops, AreThreeForwardsAndWhatIsRecomputed) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.training.local_batch_size = 2;
  config.training.global_batch_size = 2 * 2 * 3;  // on two ranks three micro-batches of two rows
  constexpr double kTokens = 3 * 2 * 16;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).all, kTokens * 3 * kForward);
  EXPECT_EQ(flops_of(config, 2).again, 0.0);
  config.activation_checkpoint.mode = RecomputeMode::kFull;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).again, kTokens * 3 * (kLayerProducts + kAttention));
  EXPECT_DOUBLE_EQ(flops_of(config, 2).all,
                   kTokens * (3 * kForward + 3 * (kLayerProducts + kAttention)));
  config.activation_checkpoint.mode = RecomputeMode::kSelective;
  EXPECT_DOUBLE_EQ(flops_of(config, 2).again, kTokens * 3 * kAttention) << "products are kept";
  config.training.seq_len.reset();
  const PlannedRun known = planned_run(config, 2);
  const RunOfPlan run = known.of(config);
  EXPECT_FALSE(step_flops(run, plan_of_steps(run, {})).has_value());
}

TEST(StepFlops, OfFrozenWeightsAreOneProductLess) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  constexpr double kTokens = 16;
  config.training.global_batch_size = 1;
  config.model.freeze = {"layers.1.mlp.up_proj"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all, kTokens * (3 * kForward - kUpProj));
  config.model.freeze = {"model.layers"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all, kTokens * (3 * kForward - 3 * kLayerProducts))
      << "the embedding in front of them is trained";
  config.model.freeze = {"embed_tokens", "layers.0"};
  EXPECT_DOUBLE_EQ(flops_of(config, 1).all,
                   kTokens * (3 * kForward - 2 * (kLayerProducts + kAttention)))
      << "no backward comes to the first layer";
}

TEST(StepFlops, AreThoseOfTheLayersOverTheRanksThatShareThem) {
  constexpr std::array kFamilies{"qwen3", "llama", "gpt2", "gemma3-text", "qwen3-moe", "gpt-oss"};
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 draw(seed);
    const auto below = [&](std::uint32_t count) {
      return static_cast<std::int64_t>(draw() % count);
    };
    const std::string family = kFamilies.at(draw() % kFamilies.size());
    const std::int64_t micro_batches = 1 + below(3), rows = 1 + below(2),
                       positions = 8 + 8 * below(3);
    const int tp = below(2) == 0 ? 1 : 2, shard = below(2) == 0 ? 1 : 2;
    const bool full = below(2) == 0;
    SCOPED_TRACE(concat("seed ", seed, ": ", family, ", ", micro_batches, " x ", rows, " x ",
                        positions, ", tp ", tp, ", shard ", shard, full ? ", full" : ""));
    const TemporaryFolder folder;
    Config config = run_case(folder, Head::kOwn);
    write_model(folder, family + "-fp32");
    config.parallelism.tensor_parallel_degree = tp;
    config.training.seq_len = positions;
    config.training.local_batch_size = rows;
    config.training.global_batch_size = shard * rows * micro_batches;
    if (full) config.activation_checkpoint.mode = RecomputeMode::kFull;
    const PlannedRun known = planned_run(config, shard * tp);
    const auto costs = layer_costs(known.source.spec, known.source.description, positions);
    const double layers = std::accumulate(costs.layers.begin(), costs.layers.end(), 0.0);
    const double tokens = static_cast<double>(micro_batches * rows * positions) / tp;
    const double expected = tokens * (3 * (layers + costs.after) + (full ? layers : 0.0));
    EXPECT_NEAR(flops_of(config, shard * tp).all, expected, 1e-12 * expected);
  }
}

}  // namespace
}  // namespace tessera::train::live_bytes_test
