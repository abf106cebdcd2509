// Traces of whole steps: what is in them agrees with the plan, and rows can be drawn.
#include <ATen/record_function.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/turns.h"
#include "pipeline/interleave.h"
#include "support/test.h"
#include "train/dry/step_traffic.h"
#include "train/report/profile.h"
#include "train/trainer.h"
#include "unit/train/planned_run.h"
#include "unit/train/read_trace.h"
#include "unit/train/run_case.h"

namespace tessera::train::trace_of_run_test {
namespace {

void expect_nested(const Rows& rows) {
  // Times have nanoseconds; sums of doubles of microseconds may be off by far less than one.
  constexpr double kHalfNanosecond = 5e-4;
  for (const auto& [row, spans] : rows) {
    std::vector<Span> open;
    for (const Span& span : spans) {
      EXPECT_LE(span.begin, span.end + kHalfNanosecond);
      if (!open.empty()) {
        EXPECT_GE(span.begin, open.back().begin - kHalfNanosecond);
      }
      while (!open.empty() && open.back().end <= span.begin + kHalfNanosecond) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(span.end, open.back().end + kHalfNanosecond)
            << row.second << " of rank " << row.first << ": " << span.name << " in "
            << open.back().name;
      }
      open.push_back(span);
    }
  }
}

std::vector<std::string> names_of(const std::vector<Span>& spans) {
  std::vector<std::string> names;
  for (const Span& span : spans) names.push_back(span.name);
  return names;
}

struct TraceCase {
  std::string name;
  int ranks = 2;
  Head head = Head::kOwn;
  bool reshard = true;
  std::int64_t micro_batches = 1;
};

class TraceOfRun : public ::testing::TestWithParam<TraceCase> {};

TEST_P(TraceOfRun, SendsTheBytesOfThePlanInRowsThatNest) {
  const TraceCase& c = GetParam();
  const TemporaryFolder folder;
  Config config = run_case(folder, c.head);
  config.metrics.trace_steps = {3};
  config.parallelism.reshard_after_forward = c.reshard;
  config.training.global_batch_size = c.micro_batches * c.ranks;
  on_ranks(c.ranks, [&](World& world) { run_training(config, world); });

  EXPECT_FALSE(std::filesystem::exists(folder / "run/metrics/trace/step-2.json"));
  const Rows rows = read_trace(folder / "run/metrics/trace/step-3.json");
  expect_nested(rows);
  const PlannedRun known = planned_run(config, c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    SCOPED_TRACE(rank);
    const auto traffic = step_traffic(config, dry_step(config, known.source, rank, c.ranks));
    EXPECT_EQ(sent(rows.at({rank, "gathers"})), traffic.gathers);
    EXPECT_EQ(sent(rows.at({rank, "reductions"})), traffic.reductions);
    const auto compute = names_of(rows.at({rank, "compute"}));
    EXPECT_EQ(compute.front(), "step 3");
    for (const auto& unit : known.plan.units) {
      const std::string name = unit.plan.name.empty() ? "(root)" : unit.plan.name;
      EXPECT_EQ(std::ranges::count(compute, "forward " + name), c.micro_batches) << name;
      EXPECT_EQ(std::ranges::count(compute, "backward " + name), c.micro_batches) << name;
    }
    const auto updates = names_of(rows.at({rank, "optimizer"}));
    EXPECT_EQ(updates, (std::vector<std::string>{"norm and clip", "update"}));
    EXPECT_THAT(names_of(rows.at({rank, "waits"})), Contains("gradient norm"));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, TraceOfRun,
                         ::testing::Values(TraceCase{"two_ranks"},
                                           TraceCase{"three_ranks_tied", 3, Head::kTied},
                                           TraceCase{"no_reshard", 2, Head::kOwn, false},
                                           TraceCase{"two_micro_batches", 2, Head::kOwn, true, 2}),
                         [](const auto& one) { return one.param.name; });

TEST(TraceOfRun, NamesUnitBucketsAndTheirBytes) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.metrics.trace_steps = {2, 3};
  PrecisionRule rule;
  rule.match = {"down_proj"};
  rule.param_dtype = DType::kFloat32;
  config.precision.rule = {rule};
  on_ranks(2, [&](World& world) { run_training(config, world); });
  for (const char* step : {"step-2.json", "step-3.json"}) {
    const Rows rows = read_trace(folder / "run/metrics/trace" / step);
    expect_nested(rows);
    int seen = 0;
    for (const Span& span : rows.at({1, "gathers"})) {
      if (span.name != "model.layers.1") continue;
      ++seen;
      EXPECT_EQ(span.arguments["kind"], "all_gather");
      EXPECT_EQ(span.arguments["unit"], "model.layers.1");
      // q and o 128 x 128, k and v 64 x 128, gate and up 192 x 128, norms 320: 98624 elements in
      // bf16, up to a multiple of 2 x 64; down 192 x 128 in fp32.
      EXPECT_EQ(span.arguments["bucket 0"], "197376 B BFloat16");
      EXPECT_EQ(span.arguments["bucket 1"], "98304 B Float");
      EXPECT_EQ(span.arguments["buffer_bytes"], 197376 + 98304);
      EXPECT_EQ(span.arguments["sent_bytes"], (197376 + 98304) / 2);
      EXPECT_GE(span.arguments["queued_ms"].get<double>(), 0.0);
      EXPECT_GE(span.arguments["waited_ms"].get<double>(), 0.0);
    }
    EXPECT_EQ(seen, 2) << "forward and backward";
  }
}

TEST(TraceOfRun, OneRankAndReplicasHaveTheirRows) {
  for (const int ranks : {1, 2}) {
    const TemporaryFolder folder;
    Config config = run_case(folder, Head::kOwn);
    config.metrics.trace_steps = {1};
    config.parallelism.data_parallel_replicate_degree = ranks;
    on_ranks(ranks, [&](World& world) { run_training(config, world); });
    const Rows rows = read_trace(folder / "run/metrics/trace/step-1.json");
    expect_nested(rows);
    EXPECT_EQ(rows.contains({0, "sums over replicas"}), ranks == 2);
    EXPECT_FALSE(rows.contains({0, "gathers"})) << "no rank shares a shard";
    EXPECT_TRUE(rows.contains({0, "compute"}));
  }
}

/// The piece that a span of the row "turns" shows: "backward 1 of stage 0 #2" is B2.
pipeline::Turn turn_of(const Span& span) {
  return {span.name.starts_with("forward") ? pipeline::Side::kForward : pipeline::Side::kBackward,
          std::stoul(span.name.substr(span.name.find('#') + 1)) - 1};
}

// The order that `tessera schedule --exchanges` simulates is the one that runs.
TEST(TraceOfRun, PairsTakeTurnsInTheOrderThatIsSimulated) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  write_model(folder, "qwen3-moe-fp32", make_room_for_bytes);
  config.metrics.trace_steps = {3};
  config.parallelism.data_parallel_shard_degree = config.parallelism.expert_parallel_degree = 2;
  config.pipeline.schedule = "Paired1F1B";
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 2 * 4;
  on_ranks(2, [&](World& world) { run_training(config, world); });
  const Rows rows = read_trace(folder / "run/metrics/trace/step-3.json");
  expect_nested(rows);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::vector<pipeline::Turn>> pairs;
    for (const Span& span : rows.at({rank, "turns"})) {
      const auto turn = turn_of(span);
      if (turn == pipeline::Turn{pipeline::Side::kBackward, 0}) pairs.emplace_back();
      ASSERT_FALSE(pairs.empty()) << span.name;
      pairs.back().push_back(turn);
    }
    EXPECT_EQ(pairs.size(), 3U) << "four micro-batches: a forward, three pairs, a backward";
    for (const auto& turns : pairs) {
      const auto count = [&](pipeline::Side side) {
        return static_cast<std::size_t>(std::ranges::count(turns, side, &pipeline::Turn::side));
      };
      const std::size_t forward = count(pipeline::Side::kForward);
      EXPECT_GT(forward, 2U);
      EXPECT_EQ(turns, pipeline::turns_of(forward, count(pipeline::Side::kBackward)))
          << to_string(turns);
    }
  }
}

TEST(TraceOfRun, ATraceChangesNoNumber) {
  std::vector<double> losses[2];
  for (const bool traced : {false, true}) {
    const TemporaryFolder folder;
    Config config = run_case(folder, Head::kOwn);
    if (traced) config.metrics.trace_steps = {1, 2, 3};
    on_ranks(2, [&](World& world) {
      TrainingHooks hooks;
      hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase&) {
        if (world.rank() == 0) losses[traced ? 1 : 0].push_back(metrics.loss);
      };
      run_training(config, world, hooks);
    });
  }
  EXPECT_EQ(losses[0].size(), 3U);
  EXPECT_EQ(losses[0], losses[1]);
}

// The profile accounts for the whole step, once.
using nlohmann::json;

json profile_of(const TemporaryFolder& folder, const Config& config, int ranks) {
  on_ranks(ranks, [&](World& world) {
    TrainingHooks hooks;
    hooks.profiling = Profiling::kYes;
    run_training(config, world, hooks);
  });
  std::ifstream file(folder / "run/profile.json");
  return json::parse(file);
}

TEST(ProfileOfRun, SharesAreOfTheWholeStepAndNoneIsMissing) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.training.steps = 6;
  const json profile = profile_of(folder, config, 2);
  double sum = 0;
  for (const char* kind :
       {"products", "other kernels", "waiting for communication", "optimizer", "own code"}) {
    EXPECT_GT(profile[kind].get<double>(), 0.0) << kind;
    sum += profile[kind].get<double>();
  }
  EXPECT_NEAR(sum, 1.0, 1e-9);
  EXPECT_GT(profile["step_ms"].get<double>(), 0.0);
  EXPECT_TRUE(profile.contains("ms tessera::wait")) << profile.dump(1);
}

TEST(ProfileOfRun, APassThatWaitsIsNotBilledForWhatTheOtherComputes) {
  StepProfile profile(at::kCPU);
  profile.begin_step();
  comm::Turns turns;
  const auto waits = [] {
    RECORD_USER_SCOPE("tessera::wait");
    comm::Turns::pass();
  };
  const auto computes = [] {
    RECORD_USER_SCOPE("tessera::product");
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < end) {
    }
    comm::Turns::pass();  // the other's scope ends before this one
  };
  turns.run(waits, computes);
  profile.end_step();
  const json found = json::parse(profile.to_json());
  EXPECT_GE(found["ms tessera::product"].get<double>(), 19.0) << found.dump(1);
  EXPECT_LT(found["ms tessera::wait"].get<double>(), 10.0) << found.dump(1);
}

TEST(ProfileOfRun, SgdIsTheOptimizersToo) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  config.optimizer.name = OptimizerName::kSgd;
  config.optimizer.momentum = 0.9;
  config.training.steps = 1;  // the only step counts where there are no more
  const json profile = profile_of(folder, config, 1);
  EXPECT_GT(profile["optimizer"].get<double>(), 0.0);
  EXPECT_GE(profile["waiting for communication"].get<double>(), 0.0);
}

TEST(StepProfile, TableHasEveryKindInMillisecondsAndPerCent) {
  StepProfile profile;
  EXPECT_EQ(profile.to_table(), "profile: no step ran\n");
  profile.begin_step();
  const auto product = at::ones({64, 64}).mm(at::ones({64, 64}));
  profile.end_step();
  const std::string table = profile.to_table();
  for (const char* row : {"products ", "other kernels ", "waiting for communication ", "optimizer ",
                          "own code ", "a step ", "aten::mm "}) {
    EXPECT_THAT(table, ::testing::ContainsRegex(std::string("  ") + row +
                                                " *[0-9]+\\.[0-9][0-9] ms +[0-9]+\\.[0-9] %\n"));
  }
  EXPECT_THAT(table, ::testing::ContainsRegex("  a step .* 100\\.0 %\n"));
  const json shares = json::parse(profile.to_json());
  EXPECT_GT(shares["products"].get<double>(), 0.0);
  EXPECT_EQ(shares["optimizer"].get<double>(), 0.0);
}

// Experts on a device: one kernel, which calls no other product there.
TEST(StepProfile, GroupedProductsAreAmongProducts) {
  const at::Tensor rows = at::ones({64, 16}), matrices = at::ones({4, 16, 32});
  const at::Tensor ends = at::arange(16, 65, 16, at::kInt);
  StepProfile profile;
  profile.begin_step();
  at::_grouped_mm(rows, matrices, ends);
  profile.end_step();
  const json found = json::parse(profile.to_json());
  const double grouped = found.value("ms aten::_grouped_mm", 0.0);
  EXPECT_GT(grouped, 0.0) << found;
  EXPECT_GE(found["products"].get<double>() * found["step_ms"].get<double>() * (1 + 1e-9),
            grouped + found.value("ms aten::mm", 0.0))
      << found;
}

}  // namespace
}  // namespace tessera::train::trace_of_run_test
