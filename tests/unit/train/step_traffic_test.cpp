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
#include <random>
#include <sstream>

#include "base/test_hooks.h"
#include "proof.h"
#include "support/test.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_memory.h"
#include "train/plan_of_run.h"
#include "train/trainer.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/read_trace.h"
#include "unit/train/run_case.h"

namespace tessera::train::step_traffic_test {
namespace {

/// One run.
struct Drawn {
  std::string family;
  bool routed = false;
  int replicate = 1, shard = 1, tp = 1, ep = 1, etp = 1, pp = 1;
  bool sequence = true;
  RouterTokens router = RouterTokens::kShards;
  std::int64_t micro_batches = 1, rows = 1, positions = 16;
  std::string recompute = "none";
  std::string dtype = "float32";
  bool sums32 = false;     ///< activation_reduce_dtype
  bool bf16_wire = false;  ///< reduce_dtype
  bool every = false;      ///< sync_every_micro_batch
  bool reshard = true;
  bool frozen = false;  ///< the embedding and the first layer
  int form = 0;         ///< of [compile]; 0: off
  std::string schedule = "1F1B";
  PipelineReshard pipeline_reshard = PipelineReshard::kStep;
  double aux_loss_coef = 0.0;
  enum class Adapters { kNone, kOfAttention, kOfExperts } adapters = Adapters::kNone;
  bool muon = false;
  bool as_one = false;  ///< Muon steps fused weights as one matrix each

  int ranks() const { return replicate * shard * tp * pp; }
};

std::ostream& operator<<(std::ostream& out, const Drawn& d) {
  return out << d.family << ", replicate " << d.replicate << ", shard " << d.shard << ", tp "
             << d.tp << (d.sequence ? "" : " whole") << ", ep " << d.ep << ", etp " << d.etp
             << ", pp " << d.pp << ' ' << d.schedule
             << (d.pipeline_reshard == PipelineReshard::kStep ? "" : " by micro-batch")
             << (d.router == RouterTokens::kAll ? ", router on all" : "") << ", " << d.micro_batches
             << " x " << d.rows << " x " << d.positions << ", " << d.recompute << ", " << d.dtype
             << (d.sums32 ? ", sums in 32" : "") << (d.bf16_wire ? ", wire in 16" : "")
             << (d.every ? ", reduced each time" : "") << (d.reshard ? "" : ", kept")
             << (d.frozen ? ", frozen" : "") << ", form " << d.form << ", aux " << d.aux_loss_coef
             << (d.adapters == Drawn::Adapters::kNone ? "" : ", adapters")
             << (d.adapters == Drawn::Adapters::kOfExperts ? " of experts" : "")
             << (d.muon ? ", Muon" : "") << (d.as_one ? ", fused as one" : "");
}

class Draws {
 public:
  explicit Draws(std::uint32_t seed) : random_(seed) {}
  template <class T>
  T one_of(std::initializer_list<T> of) {
    return of.begin()[std::uniform_int_distribution<std::size_t>(0, of.size() - 1)(random_)];
  }
  bool maybe() { return one_of({0, 1, 1}) == 0; }

 private:
  std::mt19937 random_;
};

/// A pipeline multiplies the ranks, so that no other axis is large then.
Drawn drawn(std::uint32_t seed) {
  Draws draw(seed);
  Drawn d;
  const std::pair<const char*, bool> family =
      draw.one_of<std::pair<const char*, bool>>({{"qwen3", false},
                                                 {"olmo2", false},
                                                 {"gpt2", false},
                                                 {"gemma3-text", false},
                                                 {"llama", false},
                                                 {"qwen3-moe", true},
                                                 {"deepseek-v2", true},
                                                 {"gpt-oss", true},
                                                 {"gemma4", true},
                                                 {"llama4-text", true},
                                                 {"glm4-moe", true},
                                                 {"mixtral", true}});
  d.family = family.first;
  d.routed = family.second;
  d.pp = draw.one_of({1, 1, 2});
  d.tp = draw.one_of({1, 2, 2, 4});
  if (d.pp > 1) d.tp = std::min(d.tp, 2);
  d.shard = d.tp == 4 ? 1 : draw.one_of({1, 2});
  d.replicate = d.shard * d.tp * d.pp > 4 ? 1 : draw.one_of({1, 2, 3});
  if (d.replicate * d.shard * d.tp * d.pp > 8) d.replicate = 1;
  if (d.replicate * d.shard * d.tp * d.pp == 1) d.shard = 2;
  d.sequence = !draw.maybe();
  if (d.routed) {
    d.etp = d.tp > 1 && draw.maybe() ? d.tp : 1;
    // Rows to one other rank: that is all rows that leave.
    if (d.shard * d.tp / d.etp % 2 == 0) d.ep = draw.one_of({1, 2, 2});
    if (draw.maybe()) d.router = RouterTokens::kAll;
    if (draw.maybe()) d.aux_loss_coef = 0.01;
  }
  d.rows = draw.one_of<std::int64_t>({1, 2});
  d.micro_batches = d.pp > 1 ? 2 * draw.one_of({1, 2}) : draw.one_of({1, 2, 3});
  d.positions = d.tp > 1 && !d.sequence ? draw.one_of<std::int64_t>({15, 16}) : 16;
  d.recompute = draw.one_of<const char*>({"none", "selective", "full"});
  d.dtype = draw.one_of<const char*>({"float32", "bfloat16"});
  d.sums32 = draw.maybe();
  d.bf16_wire = d.dtype == "bfloat16" && draw.maybe();
  d.every = draw.maybe();
  d.reshard = !draw.maybe();
  d.frozen = draw.maybe() && (d.pp == 1 || d.ep == 1);
  if (d.pp > 1) {
    d.schedule = draw.one_of<const char*>({"1F1B", "GPipe", "ZBV", "ZB1P"});
    d.pipeline_reshard = draw.one_of({PipelineReshard::kStep, PipelineReshard::kMicroBatch});
  } else if (draw.maybe()) {
    d.form = draw.one_of({1, 2, 3});
  }
  d.muon = draw.one_of({0, 1}) == 1;
  // Only of a model with fused weights, which experts and gpt2 have.
  d.as_one = d.muon && draw.one_of({0, 1}) == 1 && (d.routed || d.family == "gpt2");
  // Adapters have no gpt2, and are in place of a frozen part and of a loss of frozen routers.
  if (d.muon && d.family != "gpt2" && !d.frozen && d.aux_loss_coef == 0.0 &&
      draw.one_of({0, 1}) == 1) {
    using enum Drawn::Adapters;
    d.adapters = d.routed ? draw.one_of({kOfAttention, kOfExperts}) : kOfAttention;
  }
  return d;
}

/// Adapters stand beside weights, which the reference has, of a vocabulary without all bytes.
void set_adapters(Config& config, const TemporaryFolder& folder, const Drawn& d) {
  config.model.config.clear();
  config.model.path = std::string(TESSERA_TEST_DATA) + "/" + d.family + "-fp32";
  config.lora = {.rank = 2, .targets = {"o_proj"}};
  if (d.adapters == Drawn::Adapters::kOfExperts) config.lora.targets.emplace_back("experts.*");
  constexpr int kTokens = 6000;
  std::mt19937 random(7);
  std::string tokens;
  for (int i = 0; i < kTokens; ++i) {
    tokens += static_cast<char>(random() % 120);  // no image's place
    tokens += '\0';
  }
  folder.write("ids.bin", tokens);
  folder.write("ids.json",
               concat(R"({"dtype":"uint16","vocab_size":128,"num_tokens":)", kTokens, "}"));
  config.data.path = {folder / "ids.bin"};
}

Config config_of(const TemporaryFolder& folder, const Drawn& d) {
  Config config = run_case(folder, Head::kOwn);
  std::string text;
  for (int line = 0; line < 300; ++line) text += "line " + std::to_string(line) + " of a page.\n";
  folder.write("page.txt", text);
  set_parallelism(config, d);
  config.parallelism.pipeline_parallel_degree = d.pp;
  config.parallelism.reshard_after_forward = d.reshard;
  config.pipeline.schedule = d.schedule;
  config.pipeline.reshard = d.pipeline_reshard;
  config.activation_checkpoint.mode = d.recompute == "full"        ? RecomputeMode::kFull
                                      : d.recompute == "selective" ? RecomputeMode::kSelective
                                                                   : RecomputeMode::kNone;
  config.precision.param_dtype.dtype = d.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
  if (d.sums32) config.precision.activation_reduce_dtype.dtype = DType::kFloat32;
  if (d.bf16_wire) config.precision.reduce_dtype.dtype = DType::kBFloat16;
  if (d.frozen) {
    config.model.freeze = d.family == "gpt2" ? std::vector<std::string>{"wte", "wpe", "h.0"}
                                             : std::vector<std::string>{"embed_tokens", "layers.0"};
    // An explicit list is the whole one; without images the tower is no part of a step.
    if (d.family == "gemma4") config.model.freeze->emplace_back("model.vision_tower");
  }
  if (d.routed) config.model.aux_loss_coef = d.aux_loss_coef;
  if (d.form > 0) {
    config.compile.mode = CompileChoice::kPlan;
    config.compile.form = d.form;
  }
  if (d.adapters != Drawn::Adapters::kNone) set_adapters(config, folder, d);
  if (d.muon) config.optimizer.name = fsdp::OptimizerName::kMuon;
  if (d.as_one) config.optimizer.rule = {{.match = {"*"}, .split_fused = false}};
  config.training.seq_len = d.positions;
  config.training.local_batch_size = d.rows;
  config.training.global_batch_size = d.replicate * d.shard * d.rows * d.micro_batches;
  config.training.sync_every_micro_batch = d.every;
  config.training.steps = 2;
  config.metrics.trace_steps = {2};
  return config;
}

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
