#include "train/config/config_resolve.h"

#include <filesystem>

#include "support/test.h"
#include "unit/train/config/config_fixture.h"

namespace tessera::train::config_resolve_test {
namespace {

Config small_config(const std::string& more = "") {
  Config config = parse_config(kSmallConfig, "small.toml");
  std::size_t begin = 0;  // "key=value" lines over it
  while (begin < more.size()) {
    const std::size_t end = std::min(more.find('\n', begin), more.size());
    const std::string line = more.substr(begin, end - begin);
    apply_override(config, line.substr(0, line.find('=')), line.substr(line.find('=') + 1));
    begin = end + 1;
  }
  return config;
}

TEST(ConfigValidate, AcceptsAMinimalTrainingConfig) {
  EXPECT_NO_THROW(validate(small_config(), Verb::kTrain));
}

// Also with mode off: a key that would be refused later is refused now.
TEST(ConfigValidate, RefusesWhatCannotBePlanned) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"compile.passes=[\"keep\", \"keep\"]", "compile.passes: found 'keep' twice"},
      {"compile.mode=plan\nparallelism.pipeline_parallel_degree=2",
       "compile.mode: found plan with pipeline_parallel_degree 2"},
      {"compile.mode=plan\ncompile.form=1\ntraining.sync_every_micro_batch=true",
       "compile.form: found 1 with training.sync_every_micro_batch"},
  };
  for (const auto& [keys, says] : cases) {
    EXPECT_THAT(
        error_of(ErrorKind::kConfig, [&, &k = keys] { validate(small_config(k), Verb::kTrain); }),
        StartsWith(says));
  }
  EXPECT_NO_THROW(validate(small_config("compile.mode=plan\ncompile.form=2"), Verb::kTrain));
  Config budget =
      small_config("compile.mode=plan\ncompile.memory_budget=5\ndata.path=b.safetensors");
  EXPECT_NO_THROW(validate(budget, Verb::kTrain));
  budget.training.seq_len.reset();
  EXPECT_THROW(validate(budget, Verb::kTrain), Error) << "activations would be left out";
}

TEST(ConfigValidate, AMemoryBudgetIsBytesOrAShare) {
  EXPECT_EQ(small_config("compile.memory_budget=4096").compile.memory_budget,
            (MemoryBudget{.bytes = 4096}));
  for (const auto& [text, bytes] : std::map<std::string, std::int64_t>{
           {"80GB", 80'000'000'000}, {"72GiB", std::int64_t{72} << 30}, {"512MiB", 512 << 20}}) {
    EXPECT_EQ(small_config("compile.memory_budget=" + text).compile.memory_budget,
              (MemoryBudget{.bytes = bytes}));
  }
  const auto share = small_config("compile.memory_budget=62.5%");
  EXPECT_EQ(share.compile.memory_budget, (MemoryBudget{.share = 0.625}));
  EXPECT_EQ(parse_config(to_toml(share), "again"), share);
  for (const std::string bad : {"0", "-5", "0%", "101%", "nan%", "%", "9x%", "1.5", "lots"}) {
    EXPECT_THROW(small_config("compile.memory_budget=" + bad), Error) << bad;
  }
}

TEST(ConfigValidate, BatchFilesNeedNoSeqLen) {
  Config config = small_config("data.path=reference.safetensors");
  config.training.seq_len.reset();
  EXPECT_NO_THROW(validate(config, Verb::kTrain));
}

TEST(ConfigValidate, RelativeFoldersOfARunStayInside) {
  for (const std::string key : {"checkpoint.folder", "metrics.folder"}) {
    for (const std::string folder : {"..", "../elsewhere", "a/../../elsewhere"}) {
      const Config config = small_config(key + "=" + folder);
      EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { validate(config, Verb::kTrain); }),
                  AllOf(StartsWith(key), Says("'" + folder + "', which leads out")));
    }
    for (const std::string folder : {"a/../b", "..a", ".", "/tmp/../elsewhere"}) {
      EXPECT_NO_THROW(validate(small_config(key + "=" + folder), Verb::kTrain)) << folder;
    }
  }
}

TEST(ConfigValidate, GradientsNeedsOnlyAModel) {
  Config config;
  config.model.path = "folder";
  EXPECT_NO_THROW(validate(config, Verb::kGradients));
}

TEST(ConfigValidate, KeysOfWhatIsTurnedOffAreAccepted) {
  EXPECT_NO_THROW(
      validate(small_config("checkpoint.enable=false\ncheckpoint.interval=5"), Verb::kTrain));
}

TEST(ConfigValidate, FrozenPartsMayBeWholeAndDtypesChecked) {
  for (const Verb verb : {Verb::kTrain, Verb::kGradients}) {
    EXPECT_NO_THROW(validate(small_config("model.frozen=replicate\ndebug.check_dtypes=true\n"
                                          "precision.rule=[{match='x', frozen='replicate'}]"),
                             verb));
  }
}

struct BadConfig {
  std::string change;
  std::string begins;  // the key
  std::string says;
};

class ConfigRelations : public ::testing::TestWithParam<BadConfig> {};

TEST_P(ConfigRelations, AreRefusedWithTheirKey) {
  const std::string message =
      error_of(ErrorKind::kConfig, [] { validate(small_config(GetParam().change), Verb::kTrain); });
  EXPECT_THAT(message, StartsWith(GetParam().begins));
  EXPECT_THAT(message, Says(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Configs, ConfigRelations,
    ::testing::Values(
        BadConfig{"checkpoint.enable=false\ncheckpoint.load_step=5", "checkpoint.load_step",
                  "expected -1; set checkpoint.enable = true"},
        BadConfig{"device=cpu\ncomm.backend=nccl", "comm.backend", "expected auto or gloo"},
        BadConfig{"lora.rank=8", "lora.targets", "found nothing"},
        BadConfig{"lora.rank=8\nlora.targets=q_proj", "lora.rank", "for a model from scratch"},
        BadConfig{"lora.rank=8\nlora.targets=q_proj\nlora.alpha=0", "lora.alpha", "found 0"},
        BadConfig{"lora.rank=8\nlora.targets=q_proj\nmodel.config=''\nmodel.path=m\nmodel.freeze=x",
                  "model.freeze", "with lora.rank 8"},
        BadConfig{"lora.targets=q_proj", "lora", "set lora.rank"},
        BadConfig{"grad_scaler.init_scale=1000", "grad_scaler.init_scale",
                  "expected a power of two"},
        BadConfig{"grad_scaler.growth_factor=1.5", "grad_scaler.growth_factor", "power of two"},
        BadConfig{"grad_scaler.backoff_factor=1", "grad_scaler.backoff_factor", "less than 1"},
        BadConfig{"grad_scaler.min_scale=131072", "grad_scaler.min_scale",
                  "expected at most init_scale"},
        BadConfig{"pipeline.schedule=LoopedBFS", "pipeline.schedule",
                  "found 'LoopedBFS', expected one of GPipe, 1F1B"},
        BadConfig{"pipeline.schedule=ZBV\npipeline.schedule_file=a.csv",
                  "pipeline.schedule and pipeline.schedule_file", "found ZBV and 'a.csv'"},
        BadConfig{"model.path=folder", "model.path and model.config", "found both"},
        BadConfig{"model.config=", "model.path", "found nothing"},
        BadConfig{"data.path=[]", "data.path", "found nothing"},
        BadConfig{"data.path=['a.bin', 'b.safetensors']", "data.path", "b.safetensors"},
        BadConfig{"data.source=[{path='b.txt'}]", "data.path and data.source", "found both"},
        BadConfig{"data.path=[]\ndata.source=[{path='b.safetensors'}]", "data.source[1].path",
                  "b.safetensors"},
        BadConfig{"data.path=[]\ndata.source=[{path='a'}, {path='b', weight=0}]",
                  "data.source[2].weight", "found 0, expected a number above 0"},
        BadConfig{"data.path=[]\ndata.source=[{path='a', weight=-1}]", "data.source[1].weight",
                  "found -1, expected"},
        BadConfig{"data.path=[]\ndata.source=[{path='a', weight=1e-9}, {path='b'}]",
                  "data.source[1].weight", "of all weights"},
        BadConfig{"data.path=['']", "data.path", "empty name"},
        BadConfig{"job.dump_folder=''", "job.dump_folder", "empty name"},
        BadConfig{"validation.path=['a.txt', 'b.safetensors']", "validation.path", "b.safetensors"},
        BadConfig{"metrics.trace_steps=[3, 21]", "metrics.trace_steps",
                  "found 21, expected at most training.steps, 20"},
        BadConfig{"precision.accumulate_dtype=bfloat16", "precision.accumulate_dtype",
                  "reduce_dtype float32"},
        BadConfig{"precision.accumulate_dtype=float16\nprecision.reduce_dtype=bfloat16",
                  "precision.accumulate_dtype", "reduce_dtype bfloat16"},
        BadConfig{"precision.rule=[{match='x', accumulate_dtype='bfloat16'}]",
                  "precision.rule[1].accumulate_dtype", "reduce_dtype float32"}));

TEST(ConfigValidate, MissingRequiredKeysAreNamed) {
  Config config = small_config();
  config.training.steps.reset();
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { validate(config, Verb::kTrain); }),
              StartsWith("training.steps"));
  config = small_config();
  config.training.seq_len.reset();
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { validate(config, Verb::kTrain); }),
              StartsWith("training.seq_len"));
  config = small_config();
  config.optimizer.lr.reset();
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { validate(config, Verb::kTrain); }),
              StartsWith("optimizer.lr"));
}

TEST(ResolveParallelism, ShardDegreeFillsTheWorld) {
  ParallelismConfig p;
  EXPECT_EQ(resolve_parallelism(p, 1), (ParallelDims{}));
  EXPECT_EQ(resolve_parallelism(p, 3), (ParallelDims{.dp_shard = 3}));
  p.data_parallel_replicate_degree = 2;
  EXPECT_EQ(resolve_parallelism(p, 4), (ParallelDims{.dp_replicate = 2, .dp_shard = 2}));
  EXPECT_EQ(resolve_parallelism(p, 4).data_ranks(), 4);
  p.data_parallel_shard_degree = 3;
  EXPECT_EQ(resolve_parallelism(p, 6).world_size(), 6);
}

TEST(ResolveParallelism, ImpossibleDegreesNameTheKey) {
  ParallelismConfig p;
  p.data_parallel_shard_degree = 2;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 3),
                 "data_parallel_shard_degree: found 2, expected -1 or 3");
  p = {};
  p.data_parallel_replicate_degree = 2;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 3), "does not divide 3");
  p.data_parallel_replicate_degree = 8;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 4), "data_parallel_replicate_degree 8");
  p.data_parallel_replicate_degree = 2147483647;
  p.tensor_parallel_degree = 2147483647;
  p.pipeline_parallel_degree = 2147483647;
  EXPECT_THROW(resolve_parallelism(p, 4), Error);
}

TEST(ContextParallelism, HasAHeadAndATailOfARowForEachRank) {
  ParallelismConfig p;
  p.context_parallel_degree = 2;
  EXPECT_EQ(resolve_parallelism(p, 4), (ParallelDims{.dp_shard = 2, .cp = 2, .context_parts = 4}));
  EXPECT_EQ(ranks_to_spawn(p), 2);
  p.context_parallel_form = ContextForm::kHeads;
  p.context_parallel_parts = 8;
  p.tensor_parallel_degree = 2;
  EXPECT_EQ(
      resolve_parallelism(p, 4),
      (ParallelDims{.cp = 2, .tp = 2, .context_form = ContextForm::kHeads, .context_parts = 8}));
  EXPECT_EQ(resolve_parallelism(p, 8).data_ranks(), 2) << "cp has the same rows";
  p.context_parallel_degree = 1;  // one rank sums by the same parts
  EXPECT_EQ(resolve_parallelism(p, 2).context_parts, 8);
  p.context_parallel_parts = 3;
  EXPECT_NO_THROW(resolve_parallelism(p, 2));
}

TEST(ContextParallelism, OfRanksThatItDoesNotDivideNamesTheKey) {
  ParallelismConfig p;
  p.context_parallel_degree = 2;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 3), "x context_parallel_degree 2 x");
  p.data_parallel_shard_degree = 4;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 4),
                 "data_parallel_shard_degree: found 4, expected -1 or 2");
  p.data_parallel_shard_degree = -1;
  p.context_parallel_parts = 6;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 2),
                 "context_parallel_parts: found 6, expected a multiple of 4");
  p.context_parallel_parts = 1028;
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 2),
                 "context_parallel_parts: found 1028, expected at most 1024");
  p.context_parallel_degree = 2147483647;
  p.context_parallel_parts.reset();
  EXPECT_THROW(resolve_parallelism(p, 2), Error);
  EXPECT_THROW(ranks_to_spawn(p), Error);
}

// Naive: experts on ranks of dp_shard and tp alone.
TEST(ContextParallelism, LendsItsRanksToExperts) {
  ParallelismConfig p;
  p.context_parallel_degree = 4;
  p.expert_parallel_degree = 4;
  EXPECT_EQ(resolve_parallelism(p, 4).expert_data(), 1);
  p.expert_parallel_degree = 8;
  EXPECT_EQ(resolve_parallelism(p, 8).dp_shard, 2);
  EXPECT_REFUSED(kConfig, resolve_parallelism(p, 4),
                 "found 8, expected a divisor of 4 = data_parallel_shard_degree x "
                 "context_parallel_degree x tensor_parallel_degree");
}

TEST(ContextParallelism, OfPackedRowsTakesTheMostPartsThatDivideThem) {
  EXPECT_EQ(parts_of_packed_rows(1, 4096), 1);
  EXPECT_EQ(parts_of_packed_rows(2, 4096), 16);
  EXPECT_EQ(parts_of_packed_rows(2, 12), 12);
  EXPECT_EQ(parts_of_packed_rows(2, 8), 8);
  EXPECT_EQ(parts_of_packed_rows(2, 20), 4);
  EXPECT_EQ(parts_of_packed_rows(2, 7), 4) << "which check_positions() refuses";
}

TEST(CheckPositions, NamesTheNearestLengthsThatGo) {
  ParallelismConfig p;
  EXPECT_NO_THROW(check_positions(p, 7));
  p.context_parallel_degree = 2;
  EXPECT_NO_THROW(check_positions(p, 8));
  EXPECT_REFUSED(kConfig, check_positions(p, 30), "multiple of the 4 parts", "rows of 28 or 32");
  EXPECT_REFUSED(kConfig, check_positions(p, 4), "at least 4 for each", "rows of 8, ");
  EXPECT_REFUSED(kConfig, check_positions(p, 3), "rows of 8, ");
  p.tensor_parallel_degree = 3;
  EXPECT_REFUSED(kConfig, check_positions(p, 16),
                 "context_parallel_degree = 2 x tensor_parallel_degree = 3", "rows of 12 or 24");
  p.sequence_parallel = false;
  EXPECT_NO_THROW(check_positions(p, 16));
  p = {};
  p.context_parallel_parts = 8;
  EXPECT_REFUSED(kConfig, check_positions(p, 12), "multiple of the 8 parts", "rows of 8 or 16");
  EXPECT_NO_THROW(check_positions(p, 8));
}

TEST(RanksToSpawn, IsTheProductWithMinusOneAsOne) {
  ParallelismConfig p;
  EXPECT_EQ(ranks_to_spawn(p), 1);
  p.data_parallel_replicate_degree = 2;
  EXPECT_EQ(ranks_to_spawn(p), 2);
  p.data_parallel_shard_degree = 3;
  EXPECT_EQ(ranks_to_spawn(p), 6);
  p.expert_parallel_degree = 4;  // inside the others
  EXPECT_EQ(ranks_to_spawn(p), 6);
  p.data_parallel_shard_degree = 2147483647;
  EXPECT_THROW(ranks_to_spawn(p), Error);
}

TEST(ResolveBatch, GlobalBatchIsAMultipleOfWhatRanksTakeAtOnce) {
  TrainingConfig training;
  EXPECT_EQ(resolve_batch(training, 3), (BatchSizes{1, 3, 1}));
  training.local_batch_size = 2;
  training.global_batch_size = 12;
  EXPECT_EQ(resolve_batch(training, 3), (BatchSizes{2, 12, 2}));
  training.global_batch_size = 10;
  EXPECT_REFUSED(kConfig, resolve_batch(training, 3), "expected a multiple of 6");
}

TEST(ResolveMicroBatches, TheKeyMustSayWhatTheBatchSizesSayInTraining) {
  Config config;
  config.training.local_batch_size = 2;
  const auto found = [&](std::int64_t asked, std::int64_t rows, int ranks, Verb verb) {
    config.pipeline.micro_batches = asked;
    return resolve_micro_batches(config, verb, rows, ranks);
  };
  EXPECT_EQ(found(-1, 24, 3, Verb::kTrain), 4);
  EXPECT_EQ(found(4, 24, 3, Verb::kTrain), 4);
  EXPECT_EQ(found(-1, 25, 3, Verb::kTrain), 5) << "the rank with 9 rows";
  EXPECT_EQ(found(4, 24, 3, Verb::kContract), 4);
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { found(8, 24, 3, Verb::kTrain); }),
              AllOf(StartsWith("pipeline.micro_batches: found 8, expected -1 or 4"),
                    Says("24 rows of a step on 3 data rank(s)"), Says("local_batch_size 2")));
}

TEST(ResolveMicroBatches, InGradientsTheKeyCutsAndTheDefaultIsPiecesOfLocalBatchSize) {
  Config config;
  EXPECT_EQ(resolve_micro_batches(config, Verb::kGradients, 12, 2), 1) << "all rows";
  config.training.local_batch_size = 4;
  EXPECT_EQ(resolve_micro_batches(config, Verb::kGradients, 12, 2), 2);
  config.pipeline.micro_batches = 8;
  EXPECT_EQ(resolve_micro_batches(config, Verb::kGradients, 12, 2), 8);
}

// Naive: a billion row ranges are made before anything refuses.
TEST(ResolveMicroBatches, MoreThanASchedulesMostAreRefusedWithoutAPipelineToo) {
  Config config;
  config.pipeline.micro_batches = 65536;
  EXPECT_EQ(resolve_micro_batches(config, Verb::kGradients, 12, 2), 65536);
  config.pipeline.micro_batches = 1'000'000'000;
  EXPECT_REFUSED(kConfig, resolve_micro_batches(config, Verb::kGradients, 12, 2),
                 "pipeline.micro_batches: found 1000000000, expected at most 65536");
}

TEST(DataKind, GoesByTheEnding) {
  EXPECT_EQ(data_kind({"a.bin"}, "k"), DataKind::kTokens);
  EXPECT_EQ(data_kind({"a.safetensors"}, "k"), DataKind::kBatches);
  EXPECT_EQ(data_kind({"folder"}, "k"), DataKind::kText);
  EXPECT_EQ(data_kind({"a.txt", "b"}, "k"), DataKind::kText);
}

TEST(ResolvedForRun, HoldsPathsAbsoluteSoThatItMeansTheSameElsewhere) {
  Config config = small_config("");
  config.data.path = {"a.txt", "/b.txt"};
  config.validation.path = {"../held_out.txt"};
  config.pipeline.schedule_file = "mine.csv";
  const Config resolved = resolved_for_run(config, "/runs/one");
  const auto here = std::filesystem::current_path();
  EXPECT_EQ(resolved.data.path, (std::vector<std::string>{here / "a.txt", "/b.txt"}));
  EXPECT_EQ(resolved.validation.path[0], here.parent_path() / "held_out.txt");
  EXPECT_EQ(resolved.pipeline.schedule_file, here / "mine.csv");
  EXPECT_EQ(resolved.model.path.empty(), config.model.path.empty());
  const std::string model = resolved.model.path + resolved.model.config;
  EXPECT_EQ(model, here / (config.model.path + config.model.config));
}

TEST(ResolvedForRun, HoldsFoldersAbsolute) {
  const Config resolved = resolved_for_run(small_config("metrics.folder=/elsewhere"), "/runs/one");
  EXPECT_EQ(resolved.job.dump_folder, "/runs/one");
  EXPECT_EQ(resolved.checkpoint.folder, "/runs/one/checkpoint");
  EXPECT_EQ(resolved.metrics.folder, "/elsewhere");
  EXPECT_EQ(resolved.optimizer.weight_decay, 0.1);
  EXPECT_EQ(resolved_for_run(resolved, "/runs/one"), resolved);
}

TEST(LearningRate, WarmsUpInEqualSteps) {
  const LrSchedulerConfig schedule{.warmup_steps = 4};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 1), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 3), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 4), 0.8);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 5), 0.8);
}

TEST(LearningRate, ConstantWithoutAnything) {
  for (int step = 1; step <= 5; ++step) EXPECT_EQ(learning_rate({}, 0.3, 5, step), 0.3);
}

// At the factor one step behind the last, so that the last one learns: step s of n after a warm-up
// of w has gone (s - w) / (n + 1 - w) of the way.
TEST(LearningRate, LinearWouldBeAtTheFactorOneStepAfterTheLast) {
  const LrSchedulerConfig schedule{
      .warmup_steps = 2, .decay = LrDecay::kLinear, .min_lr_factor = 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 2), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 5), 0.1 + 0.9 * 6 / 9);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 10), 0.1 + 0.9 / 9);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 11), 0.1);
}

TEST(LearningRate, CosineIsHalfwayInTheMiddleAndWouldEndOneStepAfterTheLast) {
  const LrSchedulerConfig schedule{.decay = LrDecay::kCosine, .min_lr_factor = 0.2};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 7, 4), 0.6);
  EXPECT_GT(learning_rate(schedule, 1.0, 7, 7), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 7, 8), 0.2);
  EXPECT_GT(learning_rate(schedule, 1.0, 7, 1), 0.96);  // flat at the start, unlike a line (0.9)
}

TEST(LearningRate, TheLastStepLearnsWithoutAFloor) {
  for (const auto decay : {LrDecay::kLinear, LrDecay::kCosine, LrDecay::kWsd}) {
    for (const std::int64_t steps : {1, 2, 100}) {
      const LrSchedulerConfig schedule{.decay = decay, .decay_steps = 1};
      EXPECT_GT(learning_rate(schedule, 1.0, steps, steps), 0.0);
      EXPECT_NEAR(learning_rate(schedule, 1.0, steps, steps + 1), 0.0, 1e-15);
    }
  }
}

TEST(LearningRate, WsdIsWholeUpToItsLastStepsAndThenALine) {
  const LrSchedulerConfig schedule{
      .warmup_steps = 3, .decay = LrDecay::kWsd, .decay_steps = 4, .min_lr_factor = 0.5};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.9, 20, 1), 0.3);
  for (int step = 3; step <= 16; ++step) {
    EXPECT_EQ(learning_rate(schedule, 0.9, 20, step), 0.9) << step;
  }
  for (int step = 17; step <= 21; ++step) {
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.9, 20, step), 0.9 * (1 - 0.5 * (step - 16) / 5.0));
  }
}

// With all that a warm-up leaves it is the line, and more than that there is not.
TEST(LearningRate, WsdOverAllStepsIsLinear) {
  const LrSchedulerConfig linear{
      .warmup_steps = 2, .decay = LrDecay::kLinear, .min_lr_factor = 0.1};
  for (const std::int64_t decay_steps : {8, 9, 100}) {
    auto schedule = linear;
    schedule.decay = LrDecay::kWsd;
    schedule.decay_steps = decay_steps;
    EXPECT_EQ(last_whole_step(schedule, 10), 2);
    for (int step = 1; step <= 10; ++step) {
      EXPECT_EQ(learning_rate(schedule, 1.0, 10, step), learning_rate(linear, 1.0, 10, step));
    }
  }
}

TEST(LearningRate, WarmUpLongerThanTheRunNeverDecays) {
  const LrSchedulerConfig schedule{.warmup_steps = 10, .decay = LrDecay::kCosine};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 5, 5), 0.5);
}

}  // namespace
}  // namespace tessera::train::config_resolve_test
