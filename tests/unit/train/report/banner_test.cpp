#include "train/report/banner.h"

#include <random>

#include "support/temporary_folder.h"
#include "train/config/config_resolve.h"
#include "train/report/device_limits.h"
#include "train/report/progress.h"

namespace tessera::train::banner_test {
namespace {

GradContract parameter(std::int64_t rows, std::int64_t columns, DType compute) {
  GradContract contract;
  contract.shape = {rows, columns};
  contract.storage.dtype = DType::kFloat32;
  contract.compute.dtype = compute;
  contract.reduce = DType::kFloat32;
  return contract;
}

GradContract frozen(GradContract contract) {
  contract.trainable = false;
  return contract;
}

// The run stands in six lines, whose values begin in one column.
TEST(Banner, SaysOfALargeRunWhatItIs) {
  RunFacts run;
  run.parameters = {parameter(1000, 9900, DType::kBFloat16), parameter(100, 1000, DType::kFloat32)};
  run.parameters.push_back(frozen(parameter(1000, 1000, DType::kBFloat16)));
  run.parameters.back().storage.dtype = DType::kBFloat16;
  run.parameters.back().reduce = DType::kBFloat16;  // of what is frozen nothing is reduced
  run.active = 3'629'056;
  run.dims.dp_replicate = 2;
  run.dims.dp_shard = 4;
  run.dims.tp = 2;
  run.dims.ep = 8;
  run.rows = 64;
  run.row_tokens = 4096;
  run.rows_at_once = 4;
  run.first_step = 21;
  run.steps = 500;
  run.processor = {"avx512", true, 8};
  EXPECT_THAT(banner(run),
              ElementsAre("parameters  11.0 M, trained 10.0 M, active a token 3.63 M",
                          "layout      16 ranks, dp_replicate 2, dp_shard 4, tp 2, ep 8",
                          "tokens      262,144 a step: 64 rows of 4096, in 2 micro-batches of at "
                          "most 4 a rank",
                          "dtypes      storage float32, bfloat16 for 9.09 %; compute bfloat16, "
                          "float32 for 0.91 %; reduce float32",
                          "steps       21 to 500", "device      cpu, avx512, 8 threads a rank"));
}

// A machine of several devices of which a plain command uses one.
TEST(Banner, SaysHowToUseAllDevicesWhereOneRankRunsByDefault) {
  RunFacts run;
  run.device = "cuda:0 (NVIDIA H100)";
  EXPECT_EQ(banner(run).at(1), "layout      1 rank");
  run.devices_for_ranks = 1;
  EXPECT_EQ(banner(run).at(1), "layout      1 rank");
  for (const int devices : {2, 8}) {
    run.devices_for_ranks = devices;
    EXPECT_EQ(banner(run).at(1), concat("layout      1 rank on one of ", devices,
                                        " CUDA devices; --nproc ", devices, " uses all of them"));
  }
}

TEST(Banner, ALineByItselfStandsInTheSameColumn) {
  EXPECT_EQ(banner_line("run folder", "/runs/a"), "run folder  /runs/a");
}

TEST(Banner, CountsHaveThreeDigits) {
  EXPECT_EQ(short_count(0), "0");
  EXPECT_EQ(short_count(999), "999");
  EXPECT_EQ(short_count(1000), "1.00 k");
  EXPECT_EQ(short_count(999'499), "999 k");
  EXPECT_EQ(short_count(999'500), "1.00 M");
  EXPECT_EQ(short_count(10'706'944), "10.7 M");
  EXPECT_EQ(short_count(30'532'122'624), "30.5 B");
}

// Only matrices are multiplied, and only where the machine cannot do it in bf16 it is slow.
TEST(Banner, SlowBf16IsSaidWhereProductsAreEmulated) {
  const Processor without{"avx2", false, 1};
  const std::vector<GradContract> narrow{parameter(8, 8, DType::kBFloat16)};
  ASSERT_TRUE(slow_bf16(narrow, without).has_value());
  EXPECT_THAT(*slow_bf16(narrow, without),
              Says("3.4 times", "precision.param_dtype = \"float32\""));
  EXPECT_EQ(slow_bf16(narrow, {"avx512", true, 1}), std::nullopt);
  EXPECT_EQ(slow_bf16({parameter(8, 8, DType::kFloat32)}, without), std::nullopt);
  std::vector<GradContract> norm{parameter(8, 1, DType::kBFloat16)};
  norm[0].shape = {8};
  EXPECT_EQ(slow_bf16(norm, without), std::nullopt);
}

TEST(Banner, RowsBeyondTheModelsPositionsAreSaidWithBothNumbers) {
  ModelConfig model;
  model.path = "folder";
  EXPECT_EQ(long_rows(64, 64, model), std::nullopt);
  ASSERT_TRUE(long_rows(65, 64, model).has_value());
  EXPECT_THAT(*long_rows(65, 64, model), Says("training.seq_len: found rows of 65 tokens",
                                              "max_position_embeddings 64 of 'folder'"));
}

Config run_of(std::int64_t steps, double lr, const LrSchedulerConfig& schedule) {
  Config config;
  config.training.steps = steps;
  config.optimizer.lr = lr;
  config.lr_scheduler = schedule;
  return config;
}

TEST(ShortRun, SaysAWarmUpThatTheRunDoesNotEnd) {
  EXPECT_THAT(short_run(run_of(10, 0.5, {.warmup_steps = 10})), ElementsAre());
  EXPECT_THAT(short_run(run_of(10, 0.5, {.warmup_steps = 20})),
              ElementsAre(Says("lr_scheduler.warmup_steps: found 20, more than "
                               "training.steps 10",
                               "ends at the lr 0.25 of 0.5")));
}

TEST(ShortRun, SaysADecayThatTheWarmUpCutsOff) {
  LrSchedulerConfig schedule{.warmup_steps = 4, .decay = LrDecay::kWsd, .decay_steps = 6};
  EXPECT_THAT(short_run(run_of(10, 0.5, schedule)), ElementsAre());
  schedule.decay_steps = 7;
  EXPECT_THAT(short_run(run_of(10, 0.5, schedule)),
              ElementsAre(Says("lr_scheduler.decay_steps: found 7, more than the 6 of "
                               "training.steps that warmup_steps leaves")));
}

TEST(UnusedOptimizerKeys, AreNamedWithTheOptimizer) {
  OptimizerConfig optimizer;
  EXPECT_EQ(unused_optimizer_keys(optimizer), std::nullopt);
  optimizer.momentum =
      fsdp::default_momentum(optimizer.name);  // as a resolved configuration has it
  EXPECT_EQ(unused_optimizer_keys(optimizer), std::nullopt);
  optimizer.momentum = 0.9;
  optimizer.ns_steps = 3;
  EXPECT_THAT(unused_optimizer_keys(optimizer).value_or(""),
              Says("optimizer.momentum, optimizer.ns_steps: without effect, since AdamW has"));
  optimizer.name = fsdp::OptimizerName::kMuon;
  EXPECT_EQ(unused_optimizer_keys(optimizer), std::nullopt);
}

TEST(UnusedCompileKeys, AreNamedWithTheKeyThatLeavesThemWithoutEffect) {
  CompileConfig compile;
  EXPECT_EQ(unused_compile_keys(compile), std::nullopt);
  compile.plan = "plan.json";
  compile.memory_budget = MemoryBudget{.bytes = 4};
  EXPECT_THAT(unused_compile_keys(compile).value_or(""),
              Says("compile.plan, compile.memory_budget: without effect, since compile.mode"));
  compile.mode = CompileChoice::kReplay;
  EXPECT_EQ(unused_compile_keys(compile), std::nullopt);
  compile = CompileConfig();
  compile.form = 2;
  compile.passes = {{"keep"}};
  EXPECT_THAT(unused_compile_keys(compile).value_or(""),
              Says("compile.form, compile.passes: without effect, since"));
}

TEST(ChangedLr, SaysWhatARunWithMoreStepsHadAndHas) {
  const LrSchedulerConfig linear{.decay = LrDecay::kLinear};
  const auto before = run_of(4, 1.0, linear);
  EXPECT_EQ(changed_lr(before, before, 4), std::nullopt);
  const auto said = changed_lr(before, run_of(9, 1.0, linear), 4);
  ASSERT_TRUE(said.has_value());
  EXPECT_EQ(*said,
            "learning rate: training.steps was 4 and is 9: step 4 had the lr 0.2, step 5 has 0.5, "
            "the last step, 9, has 0.1");
  const auto constant = changed_lr(run_of(4, 1.0, {}), run_of(9, 2.0, {}), 3);
  ASSERT_TRUE(constant.has_value());
  EXPECT_THAT(*constant, Says("optimizer.lr was 1 and is 2", "step 3 had the lr 1, step 4 has 2"));
  EXPECT_THAT(*changed_lr(before, run_of(4, 1.0, {}), 2), Says("[lr_scheduler] is another"));
  EXPECT_THAT(*changed_lr(before, run_of(9, 1.0, linear), 4, 2),
              Says("step 4 had the lr 0.6, step 5 has 0.7, the last step, 9, has 0.3"))
      << "two of them made no update";
}

Config drawn_schedule(std::mt19937& draw) {
  const auto one_of = [&]<class T>(std::initializer_list<T> of) {
    return of.begin()[draw() % of.size()];
  };
  LrSchedulerConfig schedule{.warmup_steps = one_of({0, 0, 3, 6}),
                             .decay = static_cast<LrDecay>(one_of({0, 0, 1, 2, 3})),
                             .min_lr_factor = one_of({0.0, 0.0, 1.0})};
  if (schedule.decay == LrDecay::kWsd) schedule.decay_steps = one_of({2, 5});
  return run_of(one_of({4, 9, 12}), one_of({1.0, 1.0, 1.0, 2.0}), schedule);
}

// Naive: a run that resumes at the rate that it had is warned of its steps.
TEST(ChangedLr, IsSaidWhereARateDiffersAndOnlyThere) {
  EXPECT_EQ(changed_lr(run_of(4, 1.0, {}), run_of(9, 1.0, {}), 4), std::nullopt);
  std::mt19937 draw(20261128);
  int said = 0, silent = 0;
  for (int i = 0; i < 2000; ++i) {
    const Config before = drawn_schedule(draw), now = drawn_schedule(draw);
    const auto done = static_cast<std::int64_t>(draw() % 9);
    const auto left_out = std::min(done, static_cast<std::int64_t>(draw() % 2));
    bool differs = false;
    for (std::int64_t step = done + 1; step <= *now.training.steps; ++step) {
      const auto rate = [&](const Config& of) {
        return learning_rate(of.lr_scheduler, *of.optimizer.lr, *of.training.steps,
                             step - left_out);
      };
      differs |= rate(before) != rate(now);
    }
    EXPECT_EQ(changed_lr(before, now, done, left_out).has_value(), differs) << i;
    ++(differs ? said : silent);
  }
  EXPECT_GT(said, 500);
  EXPECT_GT(silent, 200);
}

// Naive: an H100 PCIe found as an H100.
TEST(DeviceLimits, PeaksFollowTheName) {
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(peak_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA B200"), 2250e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak_flops("Tesla T4"), std::nullopt);
  EXPECT_EQ(peak_flops(""), std::nullopt);
}

std::vector<GradContract> one_in(DType compute) {
  GradContract contract;
  contract.name = "layers.0.mlp.up_proj.weight";
  contract.compute.dtype = compute;
  return {contract};
}

TEST(DeviceLimits, SixteenBitsNeedADeviceThatHasThem) {
  EXPECT_THAT(
      error_of(ErrorKind::kConfig,
               [] { require_16_bits(one_in(DType::kBFloat16), "Tesla T4", 75); }),
      AllOf(StartsWith("precision.param_dtype: found bfloat16 (layers.0.mlp.up_proj.weight) on "
                       "Tesla T4 of compute capability 7.5"),
            Says("expected 8.0 or above"),
            Says("set precision.param_dtype = \"float32\", or device")));
  EXPECT_REFUSED(kConfig, require_16_bits(one_in(DType::kFloat16), "Tesla T4", 75),
                 "found float16");
  require_16_bits(one_in(DType::kFloat32), "Tesla T4", 75);
  require_16_bits(one_in(DType::kBFloat16), "NVIDIA A100-SXM4-80GB", 80);
  require_16_bits(one_in(DType::kBFloat16), "", 0);  // unknown
}

using std::chrono::seconds;

TEST(Progress, DurationsHaveTheUnitsThatTheyNeed) {
  EXPECT_EQ(duration_text(seconds(0)), "0:00");
  EXPECT_EQ(duration_text(seconds(-5)), "0:00");
  EXPECT_EQ(duration_text(seconds(59)), "0:59");
  EXPECT_EQ(duration_text(seconds(754)), "12:34");
  EXPECT_EQ(duration_text(seconds(3600)), "1:00:00");
  EXPECT_EQ(duration_text(seconds(2 * 86400 + 3 * 3600 + 7)), "2 d 3:00:07");
}

TEST(Progress, LoadingSaysHowMuchOfWhat) {
  constexpr std::int64_t kMib = 1024 * 1024;
  EXPECT_EQ(loading_text("loading weights", 180 * kMib, 400 * kMib),
            "loading weights   45 %  180 of 400 MiB");
  EXPECT_EQ(loading_text("loading weights", 0, 0), "loading weights  100 %  0 of 0 MiB");
}

TEST(Progress, TrainingSaysStepLossSpeedAndTime) {
  StepMetrics metrics;
  metrics.step = 12;
  metrics.loss = 3.42101;
  metrics.tps = 12345.4;
  EXPECT_EQ(training_text(metrics, 300, seconds(205)),
            "step 12 of 300    4 %  loss 3.4210  tps 12,345  3:25 left");
  EXPECT_EQ(training_text(metrics, 300, std::nullopt),
            "step 12 of 300    4 %  loss 3.4210  tps 12,345");
}

}  // namespace
}  // namespace tessera::train::banner_test
