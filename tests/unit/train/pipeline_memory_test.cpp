// Compares plans and memory of a pipeline's ranks with those of the whole model: every parameter
// has its place, what micro-batches keep adds up, and the order of slots says how much is there at
// once.
#include "train/pipeline/pipeline_memory.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "models/description.h"
#include "pipeline/kinds.h"
#include "support/test.h"
#include "train/contract_of_run.h"
#include "train/dry/step_traffic.h"
#include "train/plan_of_run.h"
#include "unit/train/run_case.h"

namespace tessera::train::pipeline_memory_test {
namespace {

enum class Head { kOwn, kTied };

/// Matrices above the 64 KiB below which buckets merge, norms below.
models::ModelSpec spec_of(Head head, std::int64_t layers = 8) {
  models::ModelSpec spec;
  spec.vocab_size = 300;
  spec.hidden_size = 128;
  spec.num_hidden_layers = layers;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 32;
  spec.intermediate_size = 192;
  spec.tie_word_embeddings = head == Head::kTied;
  return spec;
}

struct Case {
  explicit Case(Head head = Head::kOwn, ParallelDims degrees = {.pp = 2, .dp_shard = 2})
      : spec(spec_of(head)), dims(degrees), model(models::describe(spec)) {
    config.training.seq_len = 16;
    config.training.local_batch_size = 2;
    config.training.global_batch_size = 2 * 4 * dims.data_ranks();
    mesh = MeshShape::dense(dims.pp, dims.dp_replicate, dims.dp_shard, 1, dims.tp);
    std::vector<ParameterMeta> metas;
    for (const auto& row : model.parameters) {
      if (!row.tied_to.empty()) {
        std::ranges::find(metas, row.tied_to, &ParameterMeta::name)->aliases.push_back(row.name);
        continue;
      }
      metas.emplace_back();
      metas.back().name = row.name;
      metas.back().shape = row.shape;
    }
    PrecisionPolicy policy;
    policy.param_dtype = DType::kBFloat16;
    policy.rules.emplace_back();
    policy.rules.back().match = {"*norm"};
    policy.rules.back().param_dtype = DType::kFloat32;
    contract.parameters = resolve_contracts(metas, policy, {{"dp_shard"}, {}, 1.0});
  }

  PipelinePlan pipeline() const {
    return *resolve_pipeline(config, dims, spec, model, {.micro_batches = 4, .row_tokens = 16});
  }
  std::vector<RankPlan> ranks() const {
    return plan_ranks(model, contract.parameters, mesh, pipeline());
  }

  Config config;
  models::ModelSpec spec;
  ParallelDims dims;
  models::ModelDescription model;
  MeshShapes mesh;
  ModelContract contract;
};

/// How often each parameter is planned, by all ranks of the pipeline together.
std::map<std::string, int> planned(const std::vector<RankPlan>& ranks) {
  std::map<std::string, int> times;
  for (const RankPlan& rank : ranks) {
    for (const auto& unit : rank.plan.units) {
      // Small buckets stand behind the root's own, with keys that may be theirs.
      const bool takes_small_ones = unit.plan.name.empty();
      if (!takes_small_ones) layout::validate(unit.plan, unit.items, rank.plan.options);
      for (const auto& item : unit.items) ++times[item.name];
    }
  }
  return times;
}

// Naive: the embedding is left out of the last stage, or both halves of a V have one.
TEST(PipelineRanks, PlanEveryParameterOnceAndATiedOneOnEachRankThatUsesIt) {
  for (const Head head : {Head::kOwn, Head::kTied}) {
    for (const pipeline::KindRow& row : pipeline::kinds()) {
      Case one(head);
      one.config.pipeline.schedule = row.name;
      const auto times = planned(one.ranks());
      EXPECT_EQ(times.size(), one.contract.parameters.size());
      for (const auto& [name, found] : times) {
        const bool twice = head == Head::kTied && name == "model.embed_tokens.weight" &&
                           row.placement == pipeline::Placement::kLoop;
        EXPECT_EQ(found, twice ? 2 : 1) << row.name << " " << name;
      }
    }
  }
}

TEST(PipelineRanks, HaveTheUnitsOfTheirStagesBehindTheSmallBucketsOfAll) {
  Case one;
  one.config.pipeline.schedule = "ZBV";
  one.config.pipeline.split = {0, 2, 4, 6};
  const auto ranks = one.ranks();
  std::vector<std::string> names;
  for (const auto& unit : ranks.front().plan.units) names.push_back(unit.plan.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"", "model.embed_tokens", "model.layers.0", "model.layers.1",
                                      "model.layers.6", "model.layers.7", "head"}));
  ASSERT_EQ(ranks.front().stages.size(), 2U);
  EXPECT_EQ(ranks.front().stages[1].number, 3);
  EXPECT_EQ(ranks.front().stages[1].units.begin, 4);
  EXPECT_EQ(ranks.front().stages[1].units.end, 7);
  std::vector<std::string> small;
  for (const auto& item : ranks.front().plan.units[0].items) small.push_back(item.name);
  EXPECT_THAT(small, Contains("model.layers.1.input_layernorm.weight"));
  EXPECT_THAT(small, Contains("model.norm.weight"));
}

/// The same model in a folder, stepped by a rank of each place.
struct Stepped {
  explicit Stepped(const std::function<void(Config&)>& change = {}) {
    config = run_case(folder, train::Head::kOwn);
    std::ifstream in(folder / "model.json");
    auto model = nlohmann::json::parse(in);
    model["num_hidden_layers"] = 8;
    folder.write("model.json", model.dump());
    config.parallelism.pipeline_parallel_degree = 2;
    config.parallelism.data_parallel_shard_degree = 2;
    config.training.local_batch_size = 2;
    config.training.global_batch_size = 2 * 4 * 2;
    if (change) change(config);
    source = open_model(config.model, config.lora);
    dims = resolve_parallelism(config.parallelism, 4);
    contract = resolve_model(source, config, dims);
    pipeline = *resolve_pipeline(config, dims, source.spec, source.description,
                                 {.micro_batches = micro_batches(), .row_tokens = 16});
    for (const int rank : {0, 2}) steps.push_back(dry_step(config, source, rank, 4));
  }
  std::int64_t micro_batches() const {
    return config.training.global_batch_size / (2 * dims.data_ranks());
  }
  std::vector<RankPlan> ranks() const {
    return plan_ranks(source.description, contract.parameters, mesh_shape(dims), pipeline);
  }
  PipelineMemory memory() const { return pipeline_memory(config, source, dims, pipeline, steps); }

  const TemporaryFolder folder;
  Config config;
  ModelSource source;
  ParallelDims dims;
  ModelContract contract;
  PipelinePlan pipeline;
  std::vector<DryStep> steps;
};

std::int64_t activations_of(const std::string& schedule, std::int64_t micro_batches) {
  const Stepped one([&](Config& config) {
    config.pipeline.schedule = schedule;
    config.training.global_batch_size = micro_batches * 2 * 2;
  });
  const auto memory = one.memory();
  const std::int64_t live = schedule == "GPipe" ? micro_batches : schedule == "1F1B" ? 2 : 4;
  EXPECT_EQ(memory.ranks.front().live_chunks, live);
  EXPECT_LT(memory.ranks.front().activations.at(RecomputeMode::kFull),
            memory.ranks.front().activations.at(RecomputeMode::kNone));
  return memory.ranks.front().activations.at(RecomputeMode::kNone);
}

TEST(PipelineMemory, LiveMicroBatchesMultiplyWhatAStageKeeps) {
  const auto four = activations_of("GPipe", 4), six = activations_of("GPipe", 6);
  const auto eight = activations_of("GPipe", 8);
  EXPECT_GT(six, four);
  EXPECT_NEAR(static_cast<double>(eight - six), static_cast<double>(six - four), 64);
  // As many are live, of which a pair's backward lets one go before its forward has kept all.
  EXPECT_LT(activations_of("Paired1F1B", 8), four);
  EXPECT_GT(activations_of("Paired1F1B", 8), four - (six - four));
  const auto two_live = activations_of("1F1B", 4);
  EXPECT_NEAR(static_cast<double>(four - two_live), static_cast<double>(six - four),
              0.15 * static_cast<double>(six - four))
      << "two less; messages are others";
  constexpr double kMessage = 2.0 * 16 * 128 * 4;
  EXPECT_NEAR(static_cast<double>(activations_of("1F1B", 8)), static_cast<double>(two_live),
              3 * kMessage);
}

std::int64_t gathered(const RankPlan& rank, std::size_t begin, std::size_t end) {
  std::int64_t bytes = 0;
  for (std::size_t u = begin; u < end; ++u) {
    for (const auto& bucket : rank.plan.units[u].plan.buckets) {
      bytes += layout::gathered_bytes(bucket);
    }
  }
  return bytes;
}
std::int64_t of_root(const RankPlan& rank) { return gathered(rank, 0, 1); }

// A stage's parameters are there from its first F to its last B; on a V those of both are. So are
// those of the root.
TEST(PipelineMemory, UnshardedIsAStageOrBothOrAUnitAtATime) {
  const auto of_stage = [](const RankPlan& rank, std::size_t stage) {
    const layout::Range units = rank.stages[stage].units;
    return gathered(rank, static_cast<std::size_t>(units.begin),
                    static_cast<std::size_t>(units.end));
  };
  const Stepped step;
  const auto ranks = step.ranks();
  const auto kept = of_root(ranks[0]) + of_stage(ranks[0], 0);
  EXPECT_EQ(step.memory().ranks[0].held.unsharded, kept);
  const Stepped often(
      [](Config& config) { config.pipeline.reshard = PipelineReshard::kMicroBatch; });
  EXPECT_LT(often.memory().ranks[0].held.unsharded, kept);
  const Stepped v([](Config& config) { config.pipeline.schedule = "DualPipeV"; });
  const auto of_v = v.ranks();
  EXPECT_EQ(v.memory().ranks[0].held.unsharded,
            of_root(of_v[0]) + of_stage(of_v[0], 0) + of_stage(of_v[0], 1));
}

TEST(PipelineMemory, AllRanksTogetherHoldTheModelsShards) {
  const Stepped one;
  std::int64_t parameters = 0, whole = 0;
  for (const auto& rank : one.memory().ranks) parameters += rank.held.parameters;
  const auto plan =
      plan_model(one.source.description, one.contract.parameters, mesh_shape(one.dims));
  for (const auto& unit : plan.units) {
    for (const auto& bucket : unit.plan.buckets) whole += layout::shard_bytes(bucket);
  }
  EXPECT_NEAR(static_cast<double>(parameters), static_cast<double>(whole),
              0.01 * static_cast<double>(whole))
      << "but for padding";
}

// ------------------------------------------------------------------------ pairs

/// Experts over two ranks, eight micro-batches a step.
struct Pairs {
  std::int64_t layers = 4;
  std::int64_t positions = 256;
  RecomputeMode mode = RecomputeMode::kNone;

  static constexpr std::int64_t kRows = 2;
  static constexpr double kFloat = 4;
  double slots() const { return static_cast<double>(kRows * positions * 3); }  // 3 experts a token
  /// Rows of an exchange, sent and received.
  double exchange() const { return 2 * slots() * 128 * kFloat; }
  /// The bytes of the layer whose weight gradients wait for the exchange that they are formed
  /// under.
  double under_exchange() const { return slots() * (3.0 * 96 + 2.0 * 128) * kFloat; }

  /// The most activations and their gradients of rank 0.
  double activations(const std::string& schedule, int stages, pipeline::Overlap overlap) const {
    const TemporaryFolder folder;
    Config config = run_case(folder, train::Head::kOwn);
    write_model(folder, "qwen3-moe-fp32", [&](auto& model, auto& text) {
      widen(model, text);
      text.update({{"num_hidden_layers", layers}, {"vocab_size", 264}});
    });
    config.activation_checkpoint.mode = mode;
    config.parallelism.pipeline_parallel_degree = stages;
    config.parallelism.data_parallel_shard_degree = config.parallelism.expert_parallel_degree = 2;
    config.pipeline.schedule = schedule;
    config.pipeline.overlap = overlap;
    config.pipeline.reshard = PipelineReshard::kStep;
    config.precision.param_dtype.dtype = DType::kFloat32;
    config.training.seq_len = positions;
    config.training.local_batch_size = kRows;
    config.training.global_batch_size = kRows * 8 * 2;
    const auto source = open_model(config.model, config.lora);
    const auto step = dry_step(config, source, 0, 2 * stages);
    return static_cast<double>(step.peak - step.between_steps - step.held.unsharded -
                               step.held.gradients);
  }
};

// The layers that a forward adds are those that the backward paired with it, which begins, has
// freed: two micro-batches together have the layers of one. What a pair holds beyond both passes in
// turn is of one layer each, so a step of half as many layers foretells it. That a dry step holds
// what a run does: dry_step_test.cpp.
TEST(PipelineMemory, APairHoldsTheLayersOfOneMicroBatchAndWhatTwoHaveForALayer) {
  for (const auto& [schedule, stages] :
       {std::pair<const char*, int>{"Paired1F1B", 1}, {"DualPipeV", 2}}) {
    SCOPED_TRACE(schedule);
    const auto in_turn = [&](const Pairs& pairs) {
      return pairs.activations(schedule, stages, pipeline::Overlap::kOff);
    };
    const auto found = [&](const Pairs& pairs) {
      return pairs.activations(schedule, stages, pipeline::Overlap::kExperts);
    };
    for (const std::int64_t positions : {128, 256}) {
      const Pairs few{4, positions}, pairs{8, positions};
      const double beyond = found(few) - in_turn(few);
      EXPECT_GT(beyond, few.exchange());
      const double expected = in_turn(pairs) + beyond;
      EXPECT_NEAR(found(pairs), expected, 1e-3 * expected);
    }
  }
}

// Naive: what a pass has for its layer alone comes on top of all that the other one keeps.
TEST(PipelineMemory, PairsAddOneExchangeAndALayersWeightsAtMost) {
  for (const RecomputeMode mode : {RecomputeMode::kNone, RecomputeMode::kFull}) {
    for (const auto& [schedule, stages] :
         {std::pair<const char*, int>{"Paired1F1B", 1}, {"DualPipeV", 2}}) {
      SCOPED_TRACE(concat(schedule, ", mode ", static_cast<int>(mode)));
      const Pairs pairs{4, 256, mode};
      const double in_turn = pairs.activations(schedule, stages, pipeline::Overlap::kOff);
      const double found = pairs.activations(schedule, stages, pipeline::Overlap::kExperts);
      const double layer = in_turn / static_cast<double>(pairs.layers);
      EXPECT_LT(found, in_turn + layer + pairs.exchange() + pairs.under_exchange());
    }
  }
}

TEST(PipelineTraffic, IsOnceAStepOrTwiceAMicroBatch) {
  const Stepped once;
  const auto step = step_traffic(once.config, once.steps[0]);
  const Stepped by_micro_batch(
      [](Config& config) { config.pipeline.reshard = PipelineReshard::kMicroBatch; });
  const auto often = step_traffic(by_micro_batch.config, by_micro_batch.steps[0]);
  EXPECT_GT(step.gathers, 0);
  // The root stays unsharded; of two ranks each sends its half.
  const std::int64_t root = of_root(once.ranks()[0]) / 2;
  EXPECT_EQ(often.gathers - root, 8 * (step.gathers - root));
  EXPECT_EQ(often.reductions, step.reductions);
  const Stepped each([](Config& config) { config.training.sync_every_micro_batch = true; });
  EXPECT_EQ(step_traffic(each.config, each.steps[0]).reductions, 4 * step.reductions);
}

TEST(PipelineMemory, ItsTextHasAColumnARank) {
  const Stepped one;
  EXPECT_THAT(to_string(one.memory()),
              Says("pp 0        pp 1\n", "\n  live micro-batches                 2           1\n"));
  const Stepped unknown([](Config& config) { config.training.seq_len.reset(); });
  EXPECT_THAT(to_string(unknown.memory()), Says("set training.seq_len"));
}

}  // namespace
}  // namespace tessera::train::pipeline_memory_test
