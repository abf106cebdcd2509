// Compares the forecast of the bytes that a rank sends in a step with a traced step: drawn
// families, layouts, dtypes and options of a step. Every kind agrees to the byte, on every rank.
//
// Routers choose freely: the tokens that they send to other ranks are read off the trace's forward
// (for two ranks of ep, where that determines all), so that the test compares the bytes of the way
// back, of gradients and of counts.

#include "train/step_traffic.h"

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "base/test_hooks.h"
#include "proof.h"
#include "support/test.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_memory.h"
#include "train/plan_of_run.h"
#include "train/trainer.h"
#include "unit/train/drawn_run.h"
#include "unit/train/read_trace.h"
#include "unit/train/run_case.h"

namespace tessera::train::step_traffic_test {
namespace {

std::int64_t sent_by(const Rows& rows, int rank, const char* row, const std::string& axis = "") {
  const auto spans = rows.find({rank, row});
  if (spans == rows.end()) return 0;
  std::int64_t bytes = 0;
  for (const Span& span : spans->second) {
    if (axis.empty() || span.arguments["axis"] == axis) {
      bytes += span.arguments["sent_bytes"].get<std::int64_t>();
    }
  }
  return bytes;
}

/// The optimizer's collectives are in the row of sums over replicas.
std::int64_t matrices_by(const Rows& rows, int rank) {
  const auto spans = rows.find({rank, "sums over replicas"});
  if (spans == rows.end()) return 0;
  std::vector<Span> of_optimizer;
  std::ranges::copy_if(spans->second, std::back_inserter(of_optimizer), [](const Span& span) {
    return span.arguments.value("unit", "") == "optimizer";
  });
  return sent(of_optimizer);
}

/// Sends alone: a receive has bytes, too.
std::int64_t messages_by(const Rows& rows, int rank) {
  const auto spans = rows.find({rank, "messages"});
  if (spans == rows.end()) return 0;
  std::int64_t bytes = 0;
  for (const Span& span : spans->second) {
    if (span.name.find("SEND") == std::string::npos) continue;
    bytes += span.arguments["bytes"].get<std::int64_t>();
  }
  return bytes;
}

/// The traced bytes of all kinds.
StepTraffic traced(const Rows& rows, int rank) {
  StepTraffic traffic;
  traffic.gathers = sent_by(rows, rank, "gathers");
  traffic.reductions = sent_by(rows, rank, "reductions");
  traffic.matrices.sent = matrices_by(rows, rank);
  traffic.replicas = sent_by(rows, rank, "sums over replicas") - traffic.matrices.sent;
  traffic.of_tokens = {.activations = sent_by(rows, rank, "activations", "tp"),
                       .experts = sent_by(rows, rank, "activations", "ep"),
                       .messages = messages_by(rows, rank)};
  return traffic;
}

struct Kinds {
  std::int64_t gathers, reductions, replicas, matrices, activations, tokens, messages, total;
  bool operator==(const Kinds&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Kinds& k) {
  return out << "gathers " << k.gathers << ", reductions " << k.reductions << ", replicas "
             << k.replicas << ", matrices " << k.matrices << ", activations " << k.activations
             << ", tokens " << k.tokens << ", messages " << k.messages << ", total " << k.total;
}
Kinds kinds(const StepTraffic& t) {
  return {t.gathers,
          t.reductions,
          t.replicas,
          t.matrices.sent,
          t.of_tokens->activations,
          t.of_tokens->experts,
          t.of_tokens->messages,
          t.total()};
}

/// A run with all that its forecast follows from.
struct Forecast {
  Config config;
  ModelSource source;
  ParallelDims dims;
  MeshShapes mesh;
  ModelContract contract;
  std::optional<PipelinePlan> pipeline = {};
  std::vector<RankPlan> ranks = {};
  layout::ModelPlan plan = {};
  double aux_loss_coef = 0.0;

  Forecast(const Config& of, const Drawn& d)
      : config(of),
        source(open_model(config.model, config.lora)),
        dims(resolve_parallelism(config.parallelism, d.ranks())),
        mesh(mesh_shape(dims)),
        contract(resolve_model(source, config, dims)),
        aux_loss_coef(train::aux_loss_coef(config.model.aux_loss_coef, source.spec)) {
    pipeline = resolve_pipeline(config, dims, source.spec, source.description,
                                {.micro_batches = d.micro_batches, .row_tokens = d.positions});
    if (pipeline) {
      note_copies(*pipeline, source.description, contract);
      ranks = plan_ranks(source.description, contract.parameters, mesh, *pipeline);
    } else {
      plan = plan_model(source.description, contract.parameters, mesh);
    }
  }

  StepTraffic of(const Sender& sender) const {
    if (pipeline) {
      return step_traffic(PipelineRun{.config = config,
                                      .spec = source.spec,
                                      .dims = dims,
                                      .contract = contract,
                                      .pipeline = *pipeline,
                                      .ranks = ranks,
                                      .aux_loss_coef = aux_loss_coef},
                          sender);
    }
    const RunOfPlan run{.config = config,
                        .spec = source.spec,
                        .description = source.description,
                        .dims = dims,
                        .contract = contract,
                        .plan = plan,
                        .aux_loss_coef = aux_loss_coef};
    return step_traffic(run, plan_of_steps(run, {}), sender);
  }
};

/// Rows that a rank sent to the experts of the other one in the forwards of a step, by place among
/// the layers with experts.
std::vector<std::int64_t> rows_there(const Rows& rows, int rank, const Forecast& forecast,
                                     const Drawn& d) {
  const auto routed = models::routed_experts(forecast.source.spec).layers;
  const std::int64_t row_bytes = forecast.source.spec.hidden_size * (d.dtype == "float32" ? 4 : 2);
  std::vector<std::int64_t> by_place(routed.size(), 0);
  const auto spans = rows.find({rank, "activations"});
  if (spans == rows.end()) return by_place;  // stages without experts
  std::vector<std::int64_t> sent;
  for (const Span& span : spans->second) {
    if (!span.name.ends_with(" dispatch")) continue;
    sent.push_back(span.arguments["sent_bytes"].get<std::int64_t>() / row_bytes);
  }
  if (forecast.pipeline) {
    // Slots are mixed: all rows count for one layer of the rank, since all layers are equal.
    const int pp_rank = forecast.mesh.coordinate(rank, axis::kPipeline);
    const auto here = std::ranges::find_if(routed, [&](std::int64_t layer) {
      return std::ranges::any_of(stages_of_rank(*forecast.pipeline, pp_rank),
                                 [&](const auto& stage) { return stage.has_layer(layer); });
    });
    const std::int64_t all = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
    if (here == routed.end()) return by_place;
    by_place[static_cast<std::size_t>(here - routed.begin())] =
        all / (d.recompute == "none" ? 1 : 2);
    return by_place;
  }
  // Layer after layer, followed by those that are recomputed.
  const std::size_t calls = sent.size() / static_cast<std::size_t>(d.micro_batches);
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (i % calls < routed.size()) by_place[i % calls] += sent[i];
  }
  return by_place;
}

/// The loads of the two ranks of an axis ep; tokens that stay on their rank do not matter.
ExpertLoads traced_loads(const Rows& rows, int rank, const Forecast& forecast, const Drawn& d) {
  const auto members = forecast.mesh.ranks_of(rank, {axis::kExpert});
  const auto routed = models::routed_experts(forecast.source.spec);
  ExpertLoads loads(routed.layers.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto there = rows_there(rows, members[i], forecast, d);
    for (std::size_t place = 0; place < loads.size(); ++place) {
      auto& of = loads[place].emplace_back(static_cast<std::size_t>(routed.experts), 0);
      of[i == 0 ? of.size() / 2 : 0] = there[place];
    }
  }
  return loads;
}

void count_by_layout(const Drawn& d, std::map<std::string, int>& counts) {
  counts["shards"] += d.shard > 1;
  counts["shards and replicas"] += d.shard > 1 && d.replicate > 1;
  counts["tp"] += d.tp > 1;
  counts["ep"] += d.ep > 1;
  counts["etp"] += d.etp > 1;
  counts["pp"] += d.pp > 1;
  counts["adapters"] += d.adapters != Drawn::Adapters::kNone;
  counts["adapters of experts"] += d.adapters == Drawn::Adapters::kOfExperts;
  counts["fused, apart"] += !d.as_one;
  counts["fused, as one"] += d.as_one;
}

TEST(StepTraffic, IsThatOfTheTraceInDrawnLayouts) {
  const std::uint32_t draws = test::full_proof() ? 400 : 32;
  std::map<std::string, int> with_matrices;  // draws by what lies over ranks
  for (std::uint32_t seed = 1; seed <= draws; ++seed) {
    const Drawn d = drawn(seed);
    std::ostringstream words;
    words << "seed " << seed << ": " << d;
    SCOPED_TRACE(words.str());
    const TemporaryFolder folder;
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const Forecast forecast(config, d);
    on_ranks(d.ranks(), [&](World& world) { run_training(config, world); });
    const Rows rows = read_trace(folder / "run/metrics/trace/step-2.json");
    for (int rank = 0; rank < d.ranks(); ++rank) {
      ExpertLoads loads;
      if (d.ep > 1) loads = traced_loads(rows, rank, forecast, d);
      const StepTraffic found = forecast.of({.rank = rank, .loads = &loads});
      EXPECT_EQ(kinds(found), kinds(traced(rows, rank))) << "rank " << rank;
      std::int64_t most = 0;
      for (const int other : forecast.mesh.stage_of(rank)) {
        most = std::max(most, matrices_by(rows, other));
      }
      EXPECT_EQ(found.matrices.most, most) << "rank " << rank;
      if (rank == 0 && most > 0) count_by_layout(d, with_matrices);
    }
    if (::testing::Test::HasFailure()) return;
  }
  for (const auto& [what, count] : with_matrices) EXPECT_GT(count, 0) << what;
  EXPECT_FALSE(with_matrices.empty());
}

/// Each expert of each layer as often as every other one, by the tokens that each rank of ep sends.
ExpertLoads even_loads(const models::ModelSpec& spec, const Drawn& d) {
  const auto routed = models::routed_experts(spec);
  const std::int64_t choices =
      d.micro_batches * d.rows * d.positions / (d.etp > 1 ? 1 : d.tp) * routed.experts_per_token;
  EXPECT_EQ(choices % routed.experts, 0) << "no even choice";
  const std::vector<std::int64_t> of_rank(static_cast<std::size_t>(routed.experts),
                                          choices / routed.experts);
  return ExpertLoads(routed.layers.size(), std::vector(static_cast<std::size_t>(d.ep), of_rank));
}

// Users see the forecast without loads.
TEST(StepTraffic, WithoutLoadsItIsThatOfExpertsChosenEquallyOften) {
  int cases = 0, of_four = 0;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    Drawn d = drawn(seed);
    if (d.ep == 1) continue;
    if (d.shard * d.tp / d.etp % 4 == 0) d.ep = 4;
    d.rows = 6;  // 96 tokens, or parts of them that experts of all these families divide
    d.positions = 16;
    std::ostringstream words;
    words << "seed " << seed << ": " << d;
    SCOPED_TRACE(words.str());
    const TemporaryFolder folder;
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const Forecast forecast(config, d);
    const ExpertLoads even = even_loads(forecast.source.spec, d);
    ExpertLoads more = even;
    for (auto& of_layer : more) ++of_layer.front().back();  // that of another rank
    std::int64_t sent = 0, sent_more = 0;
    for (const int rank : {0, d.ranks() - 1}) {
      const StepTraffic found = forecast.of({.rank = rank});
      const StepTraffic expected = forecast.of({.rank = rank, .loads = &even});
      EXPECT_EQ(kinds(found), kinds(expected)) << "rank " << rank;
      EXPECT_TRUE(found.of_tokens->is_even);
      EXPECT_FALSE(expected.of_tokens->is_even);
      sent += found.of_tokens->experts;
      sent_more += forecast.of({.rank = rank, .loads = &more}).of_tokens->experts;
    }
    EXPECT_GT(sent, 0);
    EXPECT_GT(sent_more, sent) << "able to fail";
    ++cases;
    if (d.ep == 4) ++of_four;
  }
  EXPECT_GE(cases, 10);
  EXPECT_GE(of_four, 1);
}

// The numbers that ranks tell each other around a step, as docs/communication.md lists them.
constexpr int kRanks = 2;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kExperts = 8;

/// Own bytes of each "values of a step" and, below 0, of each "counts of a step" of rank 0, in
/// order, in a run of one step and two micro-batches.
std::vector<std::int64_t> messages(const char* family, double aux_loss_coef) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kOwn);
  write_model(folder, family, make_room_for_bytes);
  if (aux_loss_coef > 0) config.model.aux_loss_coef = aux_loss_coef;
  config.parallelism.data_parallel_shard_degree = kRanks;
  config.training.global_batch_size = kRanks * 2;
  config.training.local_batch_size = 1;
  config.training.steps = 1;
  std::vector<std::int64_t> found;
  std::mutex mutex;
  const test_hooks::Set watched(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    const bool counts = batch.label.unit == "counts of a step";
    if (rank != 0 || !(counts || batch.label.unit == "values of a step")) return;
    const std::lock_guard lock(mutex);
    found.push_back(counts ? -batch.bytes() : batch.bytes() / kRanks);
  });
  on_ranks(kRanks, [&](World& world) { run_training(config, world); });
  return found;
}

// Asked to stop; kept labels; counts of a micro-batch; sums; the end of the step.
TEST(StepMessages, OfADenseModelAreTheDocuments) {
  EXPECT_EQ(messages("qwen3-fp32", 0), (std::vector<std::int64_t>{8, -16, 16, 32}));
}

TEST(StepMessages, ExpertsAddTheirLoads) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0),
            (std::vector<std::int64_t>{8, -16, 16, -16 * kLayers * kExperts, 32}));
}

TEST(StepMessages, AnAuxiliaryLossAddsItsCountsOnceAMicroBatch) {
  EXPECT_EQ(messages("qwen3-moe-fp32", 0.01),
            (std::vector<std::int64_t>{8, -16, -16 * kExperts, -16 * kExperts, 16,
                                       -16 * kLayers * kExperts, 32}));
}

}  // namespace
}  // namespace tessera::train::step_traffic_test
