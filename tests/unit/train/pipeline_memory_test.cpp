// Plans and memory of a pipeline's ranks beside those of the whole model: every parameter has its
// place, what micro-batches keep adds up, and the order of slots says how much is there at once.
#include "train/pipeline/pipeline_memory.h"

#include "models/description.h"
#include "models/keeps/kept_activations.h"
#include "pipeline/kinds.h"
#include "support/test.h"
#include "train/plan_of_run.h"

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
  template <class Act>
  auto with_run(const Act& act) const {
    const PipelinePlan plan = pipeline();
    const std::vector<RankPlan> of_ranks = ranks();
    return act(PipelineRun{config, spec, dims, contract, plan, of_ranks});
  }
  StepTraffic traffic() const {
    return with_run([](const PipelineRun& run) { return step_traffic(run, {.rank = 0}); });
  }
  PipelineMemory memory() const {
    return with_run([](const PipelineRun& run) { return pipeline_memory(run); });
  }
  models::KeptActivations kept(std::optional<models::StageLayers> stage = {}) const {
    return models::kept_activations({.spec = spec,
                                     .degrees = dims,
                                     .parameters = contract.parameters,
                                     .rows = 2,
                                     .positions = 16,
                                     .stage = stage});
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

// What the stages keep of a micro-batch is what the whole model keeps: their borders are tensors
// of it.
TEST(PipelineActivations, OfAllStagesAreThoseOfTheModel) {
  for (const Head head : {Head::kOwn, Head::kTied}) {
    for (const bool frozen_embedding : {false, true}) {
      Case one(head);
      if (frozen_embedding) {
        one.contract.parameters.front().trainable = false;
        one.contract.parameters.at(1).trainable = false;  // of layer 0
      }
      const auto whole = one.kept();
      for (const auto mode :
           {RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective}) {
        std::int64_t kept = 0, deferred = 0;
        const auto plan = one.pipeline();
        for (int stage = 0; stage < 2; ++stage) {
          const auto of_stage = one.kept(stage_layers(plan, stage));
          EXPECT_GT(of_stage.in(mode).kept, 0);
          kept += of_stage.in(mode).kept;
          deferred += of_stage.deferred;
          EXPECT_EQ(of_stage.stream, 2 * 16 * 128 * 2) << "2 rows, bfloat16";
        }
        EXPECT_EQ(kept, whole.in(mode).kept);
        EXPECT_EQ(deferred, whole.deferred);
      }
    }
  }
}

// Inputs (q, k, v of one; o; gate and up of one; down) and gradients of results, of 32 tokens in
// bfloat16, by hand.
TEST(PipelineActivations, PutOffIsWhatTheProductsOfWeightsNeed) {
  const Case one;
  constexpr std::int64_t inputs = 128 + 128 + 128 + 192;
  constexpr std::int64_t gradients = 128 + 64 + 64 + 128 + 192 + 192 + 128;
  EXPECT_EQ(one.kept().deferred, 8 * (inputs + gradients) * 32 * 2);
}

TEST(PipelineMemory, LiveMicroBatchesMultiplyWhatAStageKeeps) {
  Case one;
  const auto plan = one.pipeline();
  const auto memory = one.memory();
  ASSERT_EQ(memory.ranks.size(), 2U);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& found = memory.ranks[static_cast<std::size_t>(rank)];
    const auto kept = one.kept(stage_layers(plan, rank));
    EXPECT_EQ(found.live_chunks, 2 - rank) << "1F1B";
    EXPECT_EQ(found.activations.none, (2 - rank) * kept.none.kept);
    EXPECT_EQ(found.activations.full,
              (2 - rank) * kept.full.kept + kept.full.peak - kept.full.kept);
  }
  one.config.pipeline.schedule = "GPipe";
  EXPECT_EQ(one.memory().ranks.front().activations.none,
            4 * one.kept(stage_layers(plan, 0)).none.kept);
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
  Case one;
  const auto of_stage = [](const RankPlan& rank, std::size_t stage) {
    const layout::Range units = rank.stages[stage].units;
    return gathered(rank, static_cast<std::size_t>(units.begin),
                    static_cast<std::size_t>(units.end));
  };
  const auto ranks = one.ranks();
  const auto kept = of_root(ranks[0]) + of_stage(ranks[0], 0);
  EXPECT_EQ(one.memory().ranks[0].held.unsharded, kept);
  one.config.pipeline.reshard = PipelineReshard::kMicroBatch;
  EXPECT_LT(one.memory().ranks[0].held.unsharded, kept);
  one.config.pipeline.reshard = PipelineReshard::kStep;
  one.config.pipeline.schedule = "DualPipeV";
  const auto v = one.ranks();
  EXPECT_EQ(one.memory().ranks[0].held.unsharded,
            of_root(v[0]) + of_stage(v[0], 0) + of_stage(v[0], 1));
}

TEST(PipelineMemory, AllRanksTogetherHoldTheModelsShards) {
  const Case one;
  std::int64_t parameters = 0;
  for (const auto& rank : one.memory().ranks) parameters += rank.held.parameters;
  const auto whole = plan_model(one.model, one.contract.parameters, one.mesh);
  const auto held = rank_memory(one.contract.parameters, whole, {});
  EXPECT_NEAR(static_cast<double>(parameters), static_cast<double>(held.parameters),
              0.01 * static_cast<double>(held.parameters))
      << "but for padding";
}

TEST(PipelineTraffic, IsOnceAStepOrTwiceAMicroBatch) {
  Case one;
  const auto ranks = one.ranks();
  const auto step = one.traffic();
  one.config.pipeline.reshard = PipelineReshard::kMicroBatch;
  const auto often = one.traffic();
  EXPECT_GT(step.gathers, 0);
  // The root stays unsharded; of two ranks each sends its half.
  const std::int64_t root = of_root(ranks[0]) / 2;
  EXPECT_EQ(often.gathers - root, 8 * (step.gathers - root));
  EXPECT_EQ(often.reductions, step.reductions);
  one.config.training.sync_every_micro_batch = true;
  EXPECT_EQ(one.traffic().reductions, 4 * step.reductions);
}

TEST(PipelineMemory, ItsTextHasAColumnARank) {
  Case one;
  const std::string text = to_string(one.memory());
  EXPECT_THAT(text,
              Says("pp 0        pp 1\n", "\n  live micro-batches                 2           1\n"));
  one.config.training.seq_len.reset();
  EXPECT_THAT(to_string(one.memory()), Says("set training.seq_len"));
}

}  // namespace
}  // namespace tessera::train::pipeline_memory_test
