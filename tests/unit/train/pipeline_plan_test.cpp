// The pipeline that follows from a configuration: who has which layers, what they cost, and every
// refusal with the numbers that do not fit. The costs are counted by hand.
#include "train/pipeline/pipeline_plan.h"

#include <numeric>

#include "io/atomic_file.h"
#include "models/description.h"
#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "support/temporary_folder.h"

namespace tessera::train::pipeline_plan_test {
namespace {

models::ModelSpec small_spec(std::int64_t layers) {
  models::ModelSpec spec;
  spec.vocab_size = 96;
  spec.hidden_size = 16;
  spec.num_hidden_layers = layers;
  spec.num_attention_heads = 2;
  spec.num_key_value_heads = 1;
  spec.head_dim = 8;
  spec.intermediate_size = 24;
  return spec;
}

/// One run, ready to be resolved.
struct Case {
  Config config = {};
  models::ModelSpec spec = small_spec(8);
  ParallelDims dims = {.pp = 2};
  PipelineBatch batch = {.micro_batches = 4, .row_tokens = 10};

  std::optional<PipelinePlan> resolve() const {
    Config of_ranks = config;
    of_ranks.parallelism.pipeline_parallel_degree = dims.pp;
    return resolve_pipeline(of_ranks, dims, spec, models::describe(spec), batch);
  }
  std::string error() const {
    return error_of(ErrorKind::kConfig, [&] { resolve(); });
  }
};

TEST(PipelinePlan, OneRankOnTheAxisHasNoPipelineForAnySection) {
  Case one{.dims = {.dp_shard = 4}};
  one.config.pipeline.split = {0, 100, 3};
  EXPECT_FALSE(one.resolve());
}

// q 16x16, k and v 16x8 each, o 16x16, gate, up and down 16x24 each, two norms of 16 and two of 8:
// 1,968 elements, twice an operation; scores and values of (10 + 1) / 2 positions in 2 heads of 8.
TEST(PipelinePlan, ALayerCostsItsActiveParametersAndItsAttention) {
  const auto spec = small_spec(3);
  const auto costs = layer_costs(spec, models::describe(spec), 10);
  const double layer = 2.0 * (256 + 128 + 128 + 256 + 3 * 384 + 32 + 16);
  EXPECT_EQ(costs.layers, std::vector<double>(3, layer + 2.0 * 2 * 16 * 5.5));
  EXPECT_EQ(costs.after, 2.0 * (16 * 96 + 16)) << "head and norm";
  EXPECT_EQ(costs.before, 0.0);
  EXPECT_EQ(layer_costs(spec, models::describe(spec), 0).layers.front(), layer);
}

TEST(PipelinePlan, ATiedHeadCostsWhatAnotherDoes) {
  auto spec = small_spec(3);
  const double untied = layer_costs(spec, models::describe(spec), 10).after;
  spec.tie_word_embeddings = true;
  EXPECT_EQ(layer_costs(spec, models::describe(spec), 10).after, untied);
}

// Positions 1 to 10 with a window of 4 see 1, 2, 3, 4, 4, ...: 34 in all.
TEST(PipelinePlan, ASlidingLayerAttendsToItsWindow) {
  auto spec = small_spec(2);
  const double plain = layer_costs(spec, models::describe(spec), 0).layers.front();
  spec.layer_types = {models::LayerType::kSliding, models::LayerType::kFull};
  spec.sliding_window = 4;
  const auto costs = layer_costs(spec, models::describe(spec), 10);
  EXPECT_DOUBLE_EQ(costs.layers.at(0), plain + 2.0 * 2 * 16 * 3.4);
  EXPECT_DOUBLE_EQ(costs.layers.at(1), plain + 2.0 * 2 * 16 * 5.5);
}

TEST(PipelinePlan, EveryKindHasEachLayerOnceEmbeddingFirstAndHeadLast) {
  for (const pipeline::KindRow& row : pipeline::kinds()) {
    Case one;
    one.config.pipeline.schedule = row.name;
    const auto plan = one.resolve();
    ASSERT_TRUE(plan) << row.name;
    EXPECT_EQ(plan->name, row.name);
    EXPECT_TRUE(validate(plan->schedule).valid());
    EXPECT_EQ(plan->schedule.ranks(), 2);
    EXPECT_EQ(plan->schedule.micro_batches, 4);
    std::vector<int> seen(8, 0);
    int embeddings = 0;
    int heads = 0;
    for (int rank = 0; rank < 2; ++rank) {
      const auto stages = stages_of_rank(*plan, rank);
      EXPECT_EQ(std::ssize(stages), row.stages_per_rank) << row.name;
      for (const models::StageLayers& stage : stages) {
        for (auto layer = stage.layers.begin; layer < stage.layers.end; ++layer) {
          ++seen.at(static_cast<std::size_t>(layer));
        }
        embeddings += stage.embedding ? 1 : 0;
        heads += stage.head ? 1 : 0;
      }
    }
    EXPECT_EQ(seen, std::vector<int>(8, 1)) << row.name;
    EXPECT_EQ(embeddings, 1);
    EXPECT_EQ(heads, 1);
    const auto costs = layer_costs(one.spec, models::describe(one.spec), 10);
    EXPECT_DOUBLE_EQ(std::accumulate(plan->costs.begin(), plan->costs.end(), 0.0),
                     std::accumulate(costs.layers.begin(), costs.layers.end(), costs.after));
  }
}

TEST(PipelinePlan, OnAVTheFirstRankHasEmbeddingAndHead) {
  Case one;
  one.config.pipeline.schedule = "ScheduleZBVZeroBubble";
  one.config.pipeline.split = {0, 1, 3, 6};
  const auto plan = one.resolve();
  using Stages = models::StagesOfRank;
  EXPECT_EQ(stages_of_rank(*plan, 0), (Stages{{true, {0, 1}, false}, {false, {6, 8}, true}}));
  EXPECT_EQ(stages_of_rank(*plan, 1), (Stages{{false, {1, 3}, false}, {false, {3, 6}, false}}));
}

TEST(PipelinePlan, StagesARankMayBeOthersWhereTheKindHasAMeaningForThem) {
  Case one;
  one.config.pipeline.schedule = "Interleaved1F1B";
  one.config.pipeline.stages_per_rank = 3;
  EXPECT_EQ(one.resolve()->schedule.stages(), 6);
  one.config.pipeline.schedule = "ZBV";
  EXPECT_THAT(one.error(), StartsWith("pipeline.stages_per_rank: found 3, expected 2 for "
                                      "pipeline.schedule ZBV"));
}

TEST(PipelinePlan, WhatDoesNotFitIsRefusedWithTheNumbers) {
  Case one{.dims = {.pp = 4}, .batch = {.micro_batches = 3, .row_tokens = 10}};
  const auto names_the_keys = Says("training.local_batch_size", "pipeline.micro_batches");
  EXPECT_THAT(one.error(),
              AllOf(StartsWith("pipeline.schedule: 1F1B on 4 ranks"),
                    Says("found 3 micro-batches, expected at least 4"), names_the_keys));
  one.batch.micro_batches = 1'000'000'000;
  EXPECT_THAT(one.error(), AllOf(Says("expected 1 to 65536"), names_the_keys));
  one.batch.micro_batches = 4;
  one.config.pipeline.schedule = "Interleaved1F1B";
  one.config.pipeline.stages_per_rank = 1'000'000;
  EXPECT_THAT(one.error(),
              AllOf(StartsWith("pipeline.schedule: "), Says("stages"), Not(names_the_keys)))
      << "another number of micro-batches does not help";
  one.config.pipeline.stages_per_rank.reset();
  one.batch.micro_batches = 8;
  one.config.pipeline.schedule = "DualPipeV";
  one.spec = small_spec(5);
  EXPECT_THAT(one.error(), StartsWith("pipeline.split: found 5 layers for 8 stages, expected at "
                                      "least 6"));
  one.spec = small_spec(6);
  EXPECT_TRUE(one.resolve());
  one.config.pipeline.split = {0, 1, 2};
  EXPECT_THAT(one.error(), StartsWith("pipeline.split: found the first layers of 3 stages, "
                                      "expected those of 8"));
  one = Case();
  one.spec = small_spec(130);
  one.config.pipeline.schedule = "Interleaved1F1B";
  one.config.pipeline.stages_per_rank = 65;
  EXPECT_THAT(one.error(),
              StartsWith("pipeline.stages_per_rank: found 65 stages on rank 0, expected "
                         "at most 64"));
  one = Case();
  one.config.pipeline.split = {0, 9};
  EXPECT_THAT(one.error(), StartsWith("pipeline.split: found stage 1 from layer 9 to 8 of 8"));
  one.config.pipeline.split = {1, 4};
  EXPECT_THAT(one.error(), StartsWith("pipeline.split: found layer 1 at the beginning"));
}

class ScheduleFile : public ::testing::Test {
 protected:
  void write(const std::string& text) {
    write_atomically(path(), text);
    case_.config.pipeline.schedule_file = path().string();
  }
  std::filesystem::path path() const { return folder_.path() / "mine.csv"; }

  TemporaryFolder folder_;
  Case case_;
};

TEST_F(ScheduleFile, GivesTheScheduleThatItHolds) {
  const auto schedule = make_schedule(pipeline::Kind::kZeroBubbleV, {2, 2, 4});
  write(to_csv(schedule));
  const auto plan = case_.resolve();
  EXPECT_EQ(plan->schedule, schedule);
  EXPECT_EQ(plan->name, path().string());
  EXPECT_TRUE(plan->remarks.empty());
  write(to_csv(pipeline::lower(schedule)));
  EXPECT_EQ(case_.resolve()->schedule, schedule);
  case_.config.pipeline.stages_per_rank = 3;
  EXPECT_THAT(case_.error(), StartsWith("pipeline.stages_per_rank: found 3, expected what makes 4 "
                                        "stages on 2 ranks"));
}

// Naive: they are validated, and others are run.
TEST_F(ScheduleFile, WithMessagesHasThemRunAsTheyStand) {
  const auto schedule = make_schedule(pipeline::Kind::kZeroBubbleV, {2, 2, 4});
  write(to_csv(schedule));
  const auto without = case_.resolve();
  EXPECT_FALSE(without->own_messages);
  const auto early = pipeline::lower(schedule, /*receives_ahead=*/2);
  ASSERT_NE(with_moves(early), with_moves(pipeline::lower(schedule)));
  write(to_csv(early));
  const auto with = case_.resolve();
  ASSERT_TRUE(with->own_messages);
  EXPECT_EQ(*with->own_messages, with_moves(early));
  EXPECT_NE(hash(*with), hash(*without)) << "ranks agree on them, too";
}

TEST_F(ScheduleFile, OfOtherRanksOrMicroBatchesIsRefusedWithBothNumbers) {
  write(to_csv(make_schedule(pipeline::Kind::kGPipe, {3, 1, 4})));
  EXPECT_THAT(case_.error(),
              AllOf(StartsWith("pipeline.schedule_file: found a schedule of 3 ranks"),
                    Says("expected one of 2")));
  write(to_csv(make_schedule(pipeline::Kind::kGPipe, {2, 1, 5})));
  EXPECT_THAT(case_.error(), Says("found a schedule of 5 micro-batches", "expected one of 4"));
}

TEST_F(ScheduleFile, ThatDoesNotValidateIsRefusedWithItsFindings) {
  auto schedule = make_schedule(pipeline::Kind::kGPipe, {2, 1, 4});
  schedule.slots[1].pop_back();
  write(to_csv(schedule));
  EXPECT_THAT(case_.error(),
              AllOf(StartsWith("pipeline.schedule_file: found "),
                    Says("which is no valid schedule (missing: stage 1: found no B, nor I and "
                         "W, of micro-batch 3"),
                    Says("tessera schedule")));
}

TEST_F(ScheduleFile, ThatIsNoneIsRefusedWithRowAndCell) {
  write("0F0,hello\n1F0\n");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { case_.resolve(); }),
              AllOf(StartsWith("pipeline.schedule_file: "), Says("row 1, cell 2")));
  case_.config.pipeline.schedule_file = (folder_.path() / "none.csv").string();
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { case_.resolve(); }),
              StartsWith("pipeline.schedule_file: "));
}

TEST_F(ScheduleFile, ThatLeavesTheOrderOfMicroBatchesIsTakenWithARemark) {
  auto schedule = make_schedule(pipeline::Kind::kGPipe, {2, 1, 4});
  for (auto& slots : schedule.slots) std::swap(slots[6], slots[7]);
  write(to_csv(schedule));
  EXPECT_FALSE(case_.resolve()->remarks.empty());
}

TEST(PipelinePlan, TheHashIsOfWhatRanksAgreeOn) {
  Case one;
  const auto base = hash(*one.resolve());
  EXPECT_EQ(hash(*one.resolve()), base);
  one.config.pipeline.reshard = PipelineReshard::kMicroBatch;
  EXPECT_NE(hash(*one.resolve()), base);
  one = {};
  one.config.pipeline.overlap = pipeline::Overlap::kOff;
  EXPECT_EQ(one.resolve()->overlap, pipeline::Overlap::kOff);
  EXPECT_NE(hash(*one.resolve()), base) << "ranks that take other turns would wait for each other";
  one = {};
  one.batch.micro_batches = 5;
  EXPECT_NE(hash(*one.resolve()), base);
  one = {};
  one.config.pipeline.split = {0, 2};
  EXPECT_NE(hash(*one.resolve()), base);
  one = {};
  one.config.pipeline.schedule = "GPipe";
  EXPECT_NE(hash(*one.resolve()), base);
}

TEST(PipelinePlan, ItsTextHasAStageALine) {
  Case one;
  one.config.pipeline.split = {0, 5};
  EXPECT_THAT(to_string(*one.resolve()),
              AllOf(StartsWith("pipeline '1F1B': 2 ranks, 2 stages, 4 micro-batches, stages "
                               "gathered once a step\n"),
                    Says("  stage 0 on rank 0: embedding, layers 0-4; forward "),
                    Says("  stage 1 on rank 1: layers 5-7, head; forward ")));
}

}  // namespace
}  // namespace tessera::train::pipeline_plan_test
