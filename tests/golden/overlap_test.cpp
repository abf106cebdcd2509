// A forward paired with a backward (pipeline.overlap) has the bits of the same schedule in turn:
// losses, norms, every gradient and the weights of clipped steps. The first step of a run records,
// and runs its pairs in turn; each later one has to issue exchanges while the other pass runs, on
// every rank. A pairwise part in ./test, a large drawn one under `scripts/full overlap`.
//
// The class of bug: a pass that sees the other's grad mode, unit, gathered memory or place; a unit
// resharded while the other pass computes with it; a collective that ranks issue in another order.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

#include "base/test_hooks.h"
#include "capture/replay/regions.h"
#include "comm/turns.h"
#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "golden/pipeline_case.h"
#include "golden/reference.h"
#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "proof.h"
#include "support/place.h"
#include "support/quiet_output.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/compile.h"
#include "train/hf/model_source.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_step.h"
#include "train/step.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden::overlap_test {
namespace {

constexpr int kMicroBatches = 4;
constexpr std::int64_t kTokens = 12;
constexpr double kMaxNorm = 0.01;

// ------------------------------------------------------------------------ cases

/// The variants of a run with the same layout.
enum class Variant : std::uint8_t {
  kPlain,
  kAdapters,
  kPacked,
  kReplayed,
  kFrozenFront,
  kAuxiliary,
  kReducedEach,
};
constexpr const char* kVariantNames[] = {"plain",        "adapters",  "packed",      "replayed",
                                         "frozen front", "auxiliary", "reduced each"};

/// A schedule that has pairs, and its ranks of axis pp.
struct Plan {
  const char* kind;
  int stages = 1;
  int per_rank = 1;
};
constexpr const char* kOtherPairs = "a file";
constexpr Plan kPlans[] = {
    {"Paired1F1B", 1}, {"Paired1F1B", 2}, {"DualPipeV", 2, 2}, {kOtherPairs, 2, 2}};

struct Case {
  PipelineCase pipeline;
  Variant variant = Variant::kPlain;
  pipeline::Overlap overlap = pipeline::Overlap::kExperts;
  int threads = 1;
};
std::string to_string(const Case& c) {
  return concat(to_string(c.pipeline), ", ", kVariantNames[static_cast<int>(c.variant)],
                c.overlap == pipeline::Overlap::kAll ? ", all" : "", ", ", c.threads, " threads");
}

/// Interleaved1F1B whose neighbours, an F and a B of other stages, are paired wherever ranks can
/// then still run: slots that no kind pairs.
std::string other_pairs() {
  static const std::string path = [] {
    auto schedule =
        pipeline::make_schedule(pipeline::Kind::kInterleavedOneFOneB, {2, 2, kMicroBatches});
    int pairs = 0;
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      for (std::size_t i = 0; i + 1 < schedule.slots[static_cast<std::size_t>(rank)].size(); ++i) {
        auto trial = schedule;
        auto& slots = trial.slots[static_cast<std::size_t>(rank)];
        const pipeline::Action first = slots[i].action, second = slots[i + 1].action;
        const bool in_order = first.kind == pipeline::ActionKind::kForward;
        slots[i] = {in_order ? first : second, in_order ? second : first};
        slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        if (!pipeline::validate(trial).valid()) continue;
        schedule = std::move(trial);
        ++pairs;
      }
    }
    EXPECT_GE(pairs, 4);
    const auto file = temporary_path("pairs.csv");
    std::ofstream(file) << to_csv(schedule);
    return file.string();
  }();
  return path;
}

train::Config config_of(const Case& c) {
  const PipelineCase& of = c.pipeline;
  auto config = config_for(of.folder, of.degrees);
  config.training.local_batch_size = 1;
  config.training.sync_every_micro_batch = c.variant == Variant::kReducedEach;
  config.training.max_norm = kMaxNorm;
  config.optimizer.lr = 0.01;
  if (of.bfloat16) config.precision = {};
  config.activation_checkpoint.mode = of.recompute;
  config.parallelism.pipeline_parallel_degree = of.stages;
  if (of.schedule == kOtherPairs) {
    config.pipeline.schedule_file = other_pairs();
  } else {
    config.pipeline.schedule = of.schedule;
  }
  config.pipeline.reshard = of.reshard;
  config.pipeline.overlap = c.overlap;
  const bool has_experts = experts_of(of.folder) == Experts::kSome;
  if (c.variant == Variant::kAuxiliary) config.model.aux_loss_coef = 0.1;
  if (c.variant == Variant::kReplayed) config.compile.mode = train::CompileChoice::kReplay;
  if (c.variant == Variant::kAdapters) {
    config.lora = {.rank = 2, .alpha = 8.0, .targets = {has_experts ? "experts.*" : "o_proj"}};
  }
  if (c.variant == Variant::kFrozenFront) {
    config.model.freeze = {"embed_tokens", "layers.0"};
    if (of.folder.starts_with("gemma4")) config.model.freeze->emplace_back("model.vision_tower");
  }
  return config;
}

/// Rows at random, the same of a step in every run.
class DrawnRows final : public train::BatchSource {
 public:
  /// The last of several data ranks has a row less, so its last micro-batch has none.
  DrawnRows(std::int64_t vocabulary, int data_ranks, bool is_packed)
      : vocabulary_(vocabulary),
        rows_(kMicroBatches * data_ranks - (data_ranks > 1 ? 1 : 0)),
        is_packed_(is_packed) {}

  std::int64_t rows_in_step() const override { return rows_; }
  std::int64_t row_tokens() const override { return kTokens; }
  std::int64_t rows_in_pass() const override { return rows_; }
  void check_labels(std::int64_t /*steps*/) override {}
  std::vector<std::string> opened_from() const override { return {}; }
  train::MicroBatch load(std::int64_t step, train::RowRange rows) const override {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step));
    const auto whole = at::TensorOptions(at::kLong);
    // No number is what Gemma has for images.
    const auto ids = at::randint(vocabulary_ / 4 + 2, 3 * vocabulary_ / 4, {rows_, kTokens + 1},
                                 generator, whole);
    auto targets = ids.slice(1, 1).contiguous();
    targets.view({-1}).slice(0, 3, rows_ * kTokens, 5).fill_(-100);
    const auto part = [&](const at::Tensor& all) {
      return all.slice(0, rows.begin, rows.end).contiguous();
    };
    train::MicroBatch batch{part(ids.slice(1, 0, kTokens)), part(targets)};
    if (!is_packed_) return batch;
    auto starts = at::zeros({rows_, kTokens}, whole);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t border = 2 + (row + step) % 5;
      starts[row].slice(0, border, kTokens).fill_(border);
      starts[row].slice(0, 9, kTokens).fill_(9);
    }
    auto fillers = at::zeros({rows_, kTokens}, at::TensorOptions(at::kBool));
    fillers.slice(1, kTokens - 2).fill_(true);
    batch.targets.slice(1, kTokens - 2).fill_(-100);
    batch.documents.starts = part(starts);
    batch.fillers = part(fillers);
    return batch;
  }

 private:
  std::int64_t vocabulary_;
  std::int64_t rows_;
  bool is_packed_;
};

// ------------------------------------------------------------------------ runs

/// Exchanges of a rank that give the turn.
struct Issued {
  int all = 0;
  int in_pairs = 0;  ///< inside of comm::Turns::run()
  int in_first = 0;  ///< of these in the first step, which records
};
thread_local Issued t_issued;

struct Step {
  double loss = 0;
  double norm = 0;
  Tensors gradients;  ///< before they are clipped
};
struct Run {
  std::vector<Step> steps;
  Tensors weights;             ///< in the end
  std::vector<Issued> issued;  ///< by rank
  std::vector<int> replayed;   ///< whether regions of the rank were
};

/// One rank of a run: what `tessera train` makes of the configuration.
class Rank {
 public:
  Rank(const train::Config& config, const train::ModelSource& source, World& world)
      : config_(config),
        dims_(train::resolve_parallelism(config.parallelism, world.size())),
        mesh_(world.mesh(train::mesh_shape(dims_))) {
    const auto plan = *train::resolve_pipeline(config, dims_, source.spec, source.description,
                                               {kMicroBatches, kTokens});
    auto parts = train::model_parts(source, config, mesh_, train::Purpose::kTraining, &plan);
    const auto borders = train::stream_borders(plan, dims_, source.description, parts.contract);
    model_ = train::parallelize(std::move(parts), source, config, mesh_);
    pipeline_.emplace(plan, borders, *model_);
    if (config.compile.mode == train::CompileChoice::kReplay) capture::replay_regions(*model_);
    optimizer_ = fsdp::make_optimizer(config.optimizer.name, *model_, *config.optimizer.lr,
                                      config.optimizer);
  }

  Step step(std::int64_t number, const train::BatchSource& rows) {
    auto options = train::step_options(config_, nullptr);
    options.pipeline = &*pipeline_;
    const auto ranges =
        train::micro_batches(rows.rows_in_step(), 1, dims_.data_ranks(), train::data_rank(mesh_));
    Step step;
    step.loss = train::forward_backward(*model_, rows, number, ranges, options).mean();
    model_->visit_full_gradients(noted(step.gradients));
    step.norm = clip_grad_norm(*model_, config_.training.max_norm);
    optimizer_->step();
    model_->zero_grad();
    return step;
  }
  Tensors weights() const {
    Tensors all;
    model_->visit_full_parameters(noted(all));
    return all;
  }
  bool has_replayed() const { return replay_calls(*model_).replayed > 0; }
  /// The first one of its stages, which has what they have.
  bool is_first() const {
    const auto firsts = mesh_.shapes().ranks_of(0, {axis::kPipeline});
    return std::ranges::count(firsts, mesh_.world()->rank()) > 0;
  }

 private:
  std::function<void(const std::string&, const at::Tensor&)> noted(Tensors& all) const {
    return [&all, is_first = is_first()](const std::string& name, const at::Tensor& tensor) {
      if (is_first) all.emplace(name, tensor.detach().cpu().clone());
    };
  }

  const train::Config& config_;
  const ParallelDims dims_;
  const Mesh mesh_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::optional<train::PipelineOfRun> pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
};

/// By rank of axis pp: of a tied pair each end has one.
void add(Tensors& all, const Tensors& more, int stage) {
  for (const auto& [name, tensor] : more) all.emplace(concat(name, " of pp ", stage), tensor);
}

Run run(const train::Config& config, const Case& c, const train::BatchSource& rows) {
  const auto source = train::open_model(config.model, config.lora);
  const auto& degrees = c.pipeline.degrees;
  const auto count = static_cast<std::size_t>(c.pipeline.stages * degrees.ranks());
  const int steps = config.compile.mode == train::CompileChoice::kReplay ? 5 : 3;
  Run run;
  run.steps.resize(static_cast<std::size_t>(steps));
  run.issued.resize(count);
  run.replayed.resize(count);
  std::mutex mutex;
  const bool all_turn = c.overlap == pipeline::Overlap::kAll;
  const test_hooks::Set counts(test_hooks::exchange_delay, [all_turn](const std::string& where) {
    if (all_turn || where.starts_with("experts")) {
      ++t_issued.all;
      if (comm::Turns::under_way()) ++t_issued.in_pairs;
    }
    return std::chrono::microseconds(0);
  });
  const test::QuietOutput quiet;
  test::ranks(static_cast<int>(count)).run([&](World& world) {
    at::set_num_threads(c.threads);
    const auto me = static_cast<std::size_t>(world.rank());
    const int stage = world.rank() / degrees.ranks();
    Rank rank(config, source, world);
    t_issued = {};
    for (int number = 0; number < steps; ++number) {
      const Step found = rank.step(number + 1, rows);
      if (number == 0) t_issued.in_first = t_issued.in_pairs;
      const std::lock_guard lock(mutex);
      Step& step = run.steps[static_cast<std::size_t>(number)];
      if (world.rank() == 0) step.loss = found.loss;
      if (world.rank() == 0) step.norm = found.norm;
      add(step.gradients, found.gradients, stage);
    }
    const Tensors weights = rank.weights();
    at::set_num_threads(1);
    const std::lock_guard lock(mutex);
    add(run.weights, weights, stage);
    run.issued[me] = t_issued;
    run.replayed[me] = rank.has_replayed();
  });
  return run;
}

void expect_same_steps(const Run& found, const Run& expected) {
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    SCOPED_TRACE(concat("step ", i + 1));
    EXPECT_EQ(found.steps[i].loss, expected.steps[i].loss);
    EXPECT_EQ(found.steps[i].norm, expected.steps[i].norm);
    EXPECT_GT(expected.steps[i].norm, kMaxNorm) << "clipped";
    EXPECT_FALSE(expected.steps[i].gradients.empty());
    expect_same_bits(found.steps[i].gradients, expected.steps[i].gradients);
  }
  expect_same_bits(found.weights, expected.weights);
}

/// A rank takes part in pairs where its layers have exchanges at all.
void expect_bits_in_turn(const Case& c) {
  auto config = config_of(c);
  const int data = c.pipeline.degrees.replicate * c.pipeline.degrees.shard;
  const DrawnRows rows(spec_of(c.pipeline.folder).vocab_size, data, c.variant == Variant::kPacked);
  const Run found = run(config, c, rows);
  config.pipeline.overlap = pipeline::Overlap::kOff;
  const Run expected = run(config, c, rows);
  expect_same_steps(found, expected);
  // On devices regions are not.
  const bool replays = c.variant == Variant::kReplayed && test::place().device == "cpu";
  // Where ranks share rows, attention is no region, and neither is what the host reads of experts.
  const bool has_regions =
      c.pipeline.degrees.cp == 1 || experts_of(c.pipeline.folder) == Experts::kNone;
  int in_pairs = 0;
  for (std::size_t rank = 0; rank < found.issued.size(); ++rank) {
    SCOPED_TRACE(concat("rank ", rank));
    const Issued& issued = found.issued[rank];
    EXPECT_EQ(issued.in_first, 0) << "the first step records";
    EXPECT_EQ(issued.in_pairs > 0, issued.all > 0);
    EXPECT_EQ(issued.all, expected.issued[rank].all);
    EXPECT_EQ(expected.issued[rank].in_pairs, 0);
    if (has_regions) EXPECT_EQ(found.replayed[rank] != 0, replays);
    in_pairs += issued.in_pairs;
  }
  EXPECT_GT(in_pairs, 0);
}

// ------------------------------------------------------------------------ products

/// The dimensions of a product in addition to plans, dtypes and ways to recompute and to gather.
struct Product {
  std::vector<std::string> folders;
  std::vector<Degrees> degrees;
  std::vector<Variant> variants;
  std::vector<pipeline::Overlap> overlaps;

  Case of(const test::Choice& choice) const {
    const Plan& plan = kPlans[choice[2]];
    const std::size_t turn = choice[0] + choice[1] + choice[4] + choice[6];
    return {.pipeline = {.folder = folders[choice[0]],
                         .schedule = plan.kind,
                         .stages = plan.stages,
                         .degrees = degrees[choice[1]],
                         .bfloat16 = choice[3] == 1,
                         .recompute = kModes[choice[4]],
                         .reshard = kReshard[choice[5]]},
            .variant = variants[choice[6]],
            .overlap = overlaps[choice[7]],
            .threads = 1 + static_cast<int>(turn % 2)};
  }
  /// Each stage has a layer.
  bool is_case(const test::Choice& choice) const {
    const Case c = of(choice);
    const int layers = c.pipeline.stages * kPlans[choice[2]].per_rank;
    const models::ModelSpec spec = spec_of(c.pipeline.folder);
    if (layers > spec.num_hidden_layers) return false;
    const Degrees& of = c.pipeline.degrees;
    if (of.cp > 1 && has_state(spec)) return false;
    for (const std::int64_t heads : kv_heads_of(c.pipeline.folder)) {
      if (of.form == ContextForm::kHeads && heads % (of.cp * of.tp) != 0) return false;
    }
    return test::full_proof() || is_short(c);
  }
  /// Enough for ./test: more than two ranks of a stage have plain runs alone.
  static bool is_short(const Case& c) {
    return c.variant == Variant::kPlain || c.pipeline.degrees.ranks() == 2;
  }
};

/// A seeded part of the whole, which is hours. In ./test every two values that can occur together,
/// each with the next folder in turn: as a dimension folders would be as many again.
std::vector<Case> cases_of(const Product& product) {
  constexpr std::uint32_t kSeed = 45;
  constexpr std::size_t kDrawn = 2000;
  const bool full = test::full_proof();
  const std::size_t folders = product.folders.size();
  const std::vector<std::size_t> sizes{
      full ? folders : 1, product.degrees.size(), std::size(kPlans),       2,
      std::size(kModes),  std::size(kReshard),    product.variants.size(), product.overlaps.size()};
  const auto is_case = [&](const test::Choice& choice) { return product.is_case(choice); };
  auto choices = full ? test::product(sizes, is_case) : test::pairwise(sizes, is_case, kSeed);
  if (full) test::shuffle(choices, kSeed);
  if (choices.size() > kDrawn) choices.resize(kDrawn);
  if (full) choices = test::part_of_proof().of(choices);
  std::vector<Case> cases;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    auto& choice = choices[i];
    if (!full) choice[0] = i % folders;
    while (!is_case(choice)) choice[0] = (choice[0] + 1) % folders;
    cases.push_back(product.of(choice));
  }
  return cases;
}

void expect_all(const Product& product) {
  for (const Case& c : cases_of(product)) {
    SCOPED_TRACE(to_string(c));
    EXPECT_NO_THROW(expect_bits_in_turn(c));
  }
}

TEST(Overlap, OfExpertsHasTheBitsOfTheSameScheduleInTurn) {
  std::vector<Degrees> degrees{{.shard = 2, .ep = 2},
                               {.shard = 4, .ep = 4},
                               {.tp = 2, .ep = 2},
                               {.tp = 2, .ep = 2, .sequence = false},
                               {.shard = 2, .tp = 2, .ep = 2, .etp = 2},
                               {.replicate = 2, .shard = 2, .ep = 2},
                               {.ep = 2, .cp = 2},
                               {.ep = 2, .cp = 2, .form = ContextForm::kHeads}};
  if (test::full_proof()) {
    degrees.push_back({.shard = 2, .tp = 2, .ep = 2});
    degrees.push_back({.shard = 2, .tp = 2, .ep = 2, .sequence = false});
    degrees.push_back({.tp = 2, .ep = 2, .cp = 2});
  }
  using enum Variant;
  expect_all(
      {{"qwen3-moe-fp32", "gpt-oss-fp32", "mixtral-fp32", "deepseek-v2-fp32", "deepseek-v3-fp32",
        "glm4-moe-fp32", "llama4-text-fp32", "gemma4-fp32", "nemotron-h-fp32", "qwen3-next-fp32"},
       degrees,
       {kPlain, kAdapters, kPacked, kReplayed, kFrozenFront, kAuxiliary, kReducedEach},
       {pipeline::Overlap::kExperts, pipeline::Overlap::kAll}});
}

TEST(Overlap, OfContextParallelHasTheBitsOfTheSameScheduleInTurn) {
  std::vector<Degrees> degrees{{.cp = 2}, {.cp = 2, .form = ContextForm::kHeads}};
  using enum Variant;
  std::vector<Variant> variants{kPacked, kReplayed};
  if (test::full_proof()) {
    degrees.push_back({.tp = 2, .cp = 2});
    variants.insert(variants.end(), {kAdapters, kFrozenFront, kReducedEach});
  }
  expect_all({{"qwen3-fp32", "llama-fp32", "gemma3-text-fp32", "olmo2-fp32"},
              degrees,
              variants,
              {pipeline::Overlap::kAll}});
}

TEST(Overlap, OfTensorParallelHasTheBitsOfTheSameScheduleInTurn) {
  std::vector<Degrees> degrees{{.tp = 2}, {.tp = 2, .sequence = false}};
  if (test::full_proof()) degrees.push_back({.shard = 2, .tp = 2});
  using enum Variant;
  expect_all({{"qwen3-fp32", "llama-fp32", "gemma3-text-fp32", "olmo2-fp32"},
              degrees,
              {kAdapters, kPacked, kReplayed, kFrozenFront, kReducedEach},
              {pipeline::Overlap::kAll}});
}

}  // namespace
}  // namespace tessera::golden::overlap_test
