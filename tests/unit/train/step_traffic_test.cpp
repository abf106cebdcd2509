// Compares the bytes that a rank sends in a dry step with a traced step: drawn families, layouts,
// dtypes and options of a step. Every kind agrees to the byte, on every rank; experts are chosen by
// drawn loads, of which the dry step is told.

#include "train/dry/step_traffic.h"

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/test_hooks.h"
#include "proof.h"
#include "support/test.h"
#include "train/contract_of_run.h"
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
  traffic.of_tokens->context = sent_by(rows, rank, "activations", "cp");
  return traffic;
}

struct Kinds {
  std::int64_t gathers, reductions, replicas, matrices, activations, tokens, context, messages,
      total;
  bool operator==(const Kinds&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Kinds& k) {
  return out << "gathers " << k.gathers << ", reductions " << k.reductions << ", replicas "
             << k.replicas << ", matrices " << k.matrices << ", activations " << k.activations
             << ", tokens " << k.tokens << ", context " << k.context << ", messages " << k.messages
             << ", total " << k.total;
}
Kinds kinds(const StepTraffic& t) {
  return {t.gathers,
          t.reductions,
          t.replicas,
          t.matrices.sent,
          t.of_tokens->activations,
          t.of_tokens->experts,
          t.of_tokens->context,
          t.of_tokens->messages,
          t.total()};
}

void count_by_layout(const Drawn& d, std::map<std::string, int>& counts) {
  counts["shards"] += d.shard > 1;
  counts["shards and replicas"] += d.shard > 1 && d.replicate > 1;
  counts["tp"] += d.tp > 1;
  counts["ep"] += d.ep > 1;
  counts["etp"] += d.etp > 1;
  counts["pp"] += d.pp > 1;
  counts["cp"] += d.cp > 1;
  counts["adapters"] += d.adapters != Drawn::Adapters::kNone;
  counts["adapters of experts"] += d.adapters == Drawn::Adapters::kOfExperts;
  counts["fused, apart"] += !d.as_one;
  counts["fused, as one"] += d.as_one;
}

/// The most bytes of matrices that a rank of the stage sends, as the plan of their exchange has it.
std::int64_t most_of_matrices(const Config& config, const ModelSource& source, int ranks,
                              int rank) {
  const ParallelDims dims = resolve_parallelism(config.parallelism, ranks);
  ModelContract contract = resolve_model(source, config, dims);
  const MeshShapes mesh = mesh_shape(dims);
  const auto& training = config.training;
  auto pipeline = resolve_pipeline(
      config, dims, source.spec, source.description,
      {.micro_batches =
           training.global_batch_size / (dims.data_ranks() * training.local_batch_size.value_or(1)),
       .row_tokens = *training.seq_len});
  if (!pipeline) {
    const auto plan = plan_model(source.description, contract.parameters, mesh);
    return sent_of_matrices(config, source.description.parameters, contract.parameters, plan, rank)
        .most;
  }
  note_copies(*pipeline, source.description, contract);
  const auto plans = plan_ranks(source.description, contract.parameters, mesh, *pipeline);
  const auto& own = plans.at(static_cast<std::size_t>(mesh.coordinate(rank, axis::kPipeline)));
  return sent_of_matrices(config, own.parameters, contract.parameters, own.plan, rank).most;
}

TEST(StepTraffic, IsThatOfTheTraceInDrawnLayouts) {
  std::map<std::string, int> with_matrices;  // draws by what lies over ranks
  std::uint32_t routed_draws = 0;
  for_drawn(
      test::full_proof() ? 400 : 32,
      [&](Drawn d) {
        if (d.ep > 1 && d.shard * d.tp / d.etp % 4 == 0) d.ep = 4;
        const DrawnRun run(d);
        const Config& config = run.config;
        const ModelSource& source = run.source;
        const models::RoutedExperts routed = models::routed_experts(source.spec);
        const ExpertLoads loads = d.routed ? drawn_loads(++routed_draws, routed) : ExpertLoads();
        on_ranks(d.ranks(), loads, source, [&](World& world) { run_training(config, world); });
        const Rows rows = read_trace(run.folder / "run/metrics/trace/step-2.json");
        const MeshShapes mesh = mesh_shape(resolve_parallelism(config.parallelism, d.ranks()));
        for (int rank = 0; rank < d.ranks(); ++rank) {
          auto found =
              step_traffic(config, dry_step(config, source, rank, d.ranks(), {.loads = loads}));
          auto real = traced(rows, rank);
          if (d.ep > 1 && !sends_alike(d)) {
            EXPECT_EQ(found.of_tokens->experts > 0, real.of_tokens->experts > 0) << "rank " << rank;
            found.of_tokens->experts = real.of_tokens->experts = 0;
          }
          EXPECT_EQ(kinds(found), kinds(real)) << "rank " << rank;
          std::int64_t most = 0;
          for (const int other : mesh.stage_of(rank))
            most = std::max(most, matrices_by(rows, other));
          EXPECT_EQ(most_of_matrices(config, source, d.ranks(), rank), most) << "rank " << rank;
          if (rank == 0 && most > 0) count_by_layout(d, with_matrices);
        }
      },
      SharedRows::kSome);
  for (const auto& [what, count] : with_matrices) EXPECT_GT(count, 0) << what;
  EXPECT_FALSE(with_matrices.empty());
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

// Asked to stop; unmasked targets; counts of a micro-batch; sums; the end of the step.
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
