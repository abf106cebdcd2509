// `tessera train` as the ranks of a pipeline, as processes: numbers and weights are those of the
// run of the same layout and micro-batches without one, bit for bit, with every schedule and
// option; a run resumes with other numbers of stages; the other commands read what it has saved;
// what cannot be is refused with its numbers before anything is written.
//
// Every layout and recomputation in process: golden and dist tests. Next: pipeline_faults_test.cpp.

#include "cli/pipeline_run.h"
#include "dist/checkpoint_tensors.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::pipeline_test {
namespace {

namespace fs = std::filesystem;

constexpr int kMicroBatches = 8;
constexpr int kSteps = 4;
/// Sums of doubles in another order: norm over data ranks, auxiliary loss over layers.
constexpr double kDoubleNoise = 1e-7;
/// Sums of floats in another order: some thirty roundings of 6e-8, over four steps.
constexpr double kFloatNoise = 2e-6;

class PipelineRun : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("held_out.txt", std::string(400, 'x') + " and no more of it.\n");
  }

  void train(const std::string& run, int ranks, int rows, const Words& more,
             int threads = 1) const {
    const Outcome outcome = run_program(
        folder_,
        training(run, ranks, rows, joined({"--training.steps", std::to_string(kSteps)}, more)),
        // Threads that spin take the cores of the other rank, and of other tests.
        concat("OMP_WAIT_POLICY=passive OMP_NUM_THREADS=", threads));
    ASSERT_EQ(outcome.code, 0) << run << ": " << outcome.err;
    EXPECT_THAT(outcome.err,
                Says(concat(threads, threads == 1 ? " thread" : " threads", " a rank")));
  }

  /// The output of `convert` for a step: all weights, in one file.
  std::string weights(const std::string& run, int step = kSteps) const {
    const std::string out = run + "-hf";
    fs::remove_all(folder_ / out);
    const std::string from = concat(run, "/checkpoint/step-", step);
    succeeded(run_program(folder_, {"convert", from, out, "--dtype", "auto"}));
    return read_file(folder_ / (out + "/model.safetensors"));
  }

  /// The output of `convert` for a step of adapters, as peft reads it.
  std::string adapters(const std::string& run, int step) const {
    const std::string out = concat(run, "-peft-", step);
    const std::string from = concat(run, "/checkpoint/step-", step);
    succeeded(run_program(folder_, {"convert", from, out}));
    return read_file(folder_ / (out + "/adapter_model.safetensors"));
  }

  void expect_same_weights(const std::string& found, const std::string& expected) const {
    const std::string wanted = weights(expected);
    EXPECT_GT(wanted.size(), 10'000U);
    EXPECT_TRUE(weights(found) == wanted) << "weights of " << found;
  }

  /// Weights and what the optimizer keeps of them, by name: in which files depends on the ranks.
  void expect_same_checkpoint(const std::string& found, const std::string& expected) const {
    const auto tensors = [&](const std::string& run) {
      return test::all_tensors(folder_ / concat(run, "/checkpoint/step-", kSteps));
    };
    const auto wanted = tensors(expected);
    const auto of_optimizer = std::ranges::count_if(
        wanted, [](const auto& one) { return one.first.starts_with("optim/"); });
    EXPECT_GT(of_optimizer, 100);
    EXPECT_GE(of_optimizer, 2 * (std::ssize(wanted) - of_optimizer)) << "two moments of each";
    const auto have = tensors(found);
    ASSERT_EQ(have.size(), wanted.size()) << found;
    for (const auto& [name, bytes] : wanted) {
      ASSERT_TRUE(have.contains(name)) << name;
      EXPECT_TRUE(have.at(name) == bytes) << name << " of " << found;
    }
  }

  /// Every number of every step: losses, norm, loss scale, loads of experts, validation.
  void expect_same_numbers(const std::string& found, const std::string& expected) const {
    const auto wanted = numbers(folder_ / expected);
    EXPECT_EQ(steps_in(wanted), kSteps);
    EXPECT_EQ(numbers(folder_ / found), wanted) << found;
  }

  /// The same numbers but for the order in which they are added.
  void expect_near_numbers(const std::string& found, const std::string& expected,
                           double noise = kDoubleNoise) const {
    const auto wanted = numbers(folder_ / expected);
    const auto steps = numbers(folder_ / found);
    ASSERT_EQ(steps_in(wanted), kSteps);
    ASSERT_EQ(steps.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_EQ(steps[i].size(), wanted[i].size());
      for (const auto& [key, value] : wanted[i].items()) {
        const auto expected_value = value.get<double>();
        EXPECT_NEAR(steps[i].at(key).get<double>(), expected_value,
                    noise * std::abs(expected_value))
            << found << ", step " << wanted[i].at("step") << ", " << key;
      }
    }
  }

  PipelineFolder folder_;
};

TEST_F(PipelineRun, OfEveryKindHasTheBitsOfTheRunWithout) {
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, kMicroBatches, {}));
  // ./test --all has one stage a rank, two, a V, and four ranks.
  std::vector<std::pair<int, std::string>> pipelines{
      {2, "ZB1P"}, {2, "InterleavedZeroBubble"}, {2, "DualPipeV"}, {4, "ZBV"}};
  if (test::full_proof()) {
    pipelines.insert(pipelines.end(), {{2, "GPipe"},
                                       {2, "1F1B"},
                                       {2, "Interleaved1F1B"},
                                       {2, "Paired1F1B"},
                                       {2, "ZBV"},
                                       {4, "1F1B"},
                                       {4, "InterleavedZeroBubble"}});
  }
  for (const auto& [ranks, schedule] : pipelines) {
    const std::string run = concat(schedule, "-", ranks);
    ASSERT_NO_FATAL_FAILURE(train(run, ranks, kMicroBatches, as_pipeline(ranks, schedule)));
    expect_same_numbers(run, "whole");
    expect_same_weights(run, "whole");
    expect_same_checkpoint(run, "whole");
  }
}

// Layers are wide enough for libtorch's loops and products to share their rows among threads.
TEST_F(PipelineRun, OfTwoThreadsARankHasTheBitsOfTheRunWithout) {
  folder_.write_variant(
      "wide.json", {{"hidden_size", 32}, {"num_hidden_layers", 2}, {"intermediate_size", 4096}});
  const Words wide{"--model.config", "wide.json"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, 2, wide, /*threads=*/2));
  ASSERT_NO_FATAL_FAILURE(train("stages", 2, 2, joined(as_pipeline(2, "ZB1P"), wide), 2));
  expect_same_numbers("stages", "whole");
  expect_same_weights("stages", "whole");
}

struct Options {
  std::string name;
  Words words;
  std::string schedule = "1F1B";
  Words of_pipeline = {};  ///< that mean nothing without one
};

void PrintTo(const Options& options, std::ostream* out) { *out << options.name; }

class PipelineOptions : public PipelineRun, public ::testing::WithParamInterface<Options> {};

TEST_P(PipelineOptions, HaveTheBitsOfTheRunWithout) {
  const Options& options = GetParam();
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, kMicroBatches, options.words));
  const Words more =
      joined(joined(as_pipeline(2, options.schedule), options.words), options.of_pipeline);
  ASSERT_NO_FATAL_FAILURE(train("stages", 2, kMicroBatches, more));
  expect_same_numbers("stages", "whole");
  expect_same_weights("stages", "whole");
}

INSTANTIATE_TEST_SUITE_P(
    Each, PipelineOptions,
    ::testing::Values(
        Options{"bfloat16_recomputed",
                {"--precision.param_dtype", "bfloat16", "--activation_checkpoint.mode", "full"},
                "DualPipeV"},
        Options{"float16_whose_first_scale_is_too_large",
                {"--precision.param_dtype", "float16", "--grad_scaler.init_scale", "16777216"},
                "ZBV"},
        Options{"reduced_after_each_micro_batch",
                {"--training.sync_every_micro_batch", "true"},
                "ZB1P"},
        Options{"gathered_for_each_micro_batch", {}, "ZBV", {"--pipeline.reshard", "micro_batch"}},
        Options{"validated_and_checked",
                {"--validation.path", "held_out.txt", "--validation.interval", "2",
                 "--validation.steps", "3", "--debug.check_dtypes", "true"},
                "DualPipeV"},
        Options{"front_frozen_and_recomputed",
                {"--model.freeze",
                 R"(["model.embed_tokens", "layers.0", "layers.1", "layers.2", "layers.4"])",
                 "--activation_checkpoint.mode", "full"},
                "ZB1P"},
        // Neither end adds anything to what both have; products of layers are deferred all the
        // same.
        Options{"frozen_tied_ends",
                {"--model.config", "tied.json", "--model.freeze", R"(["model.embed_tokens"])"},
                "ZB1P"},
        Options{"split_as_given_before_the_head", {}, "1F1B", {"--pipeline.split", "[0,8]"}},
        Options{"expert_biases",
                {"--model.config", "moe.json", "--model.load_balance_coeff", "0.01"},
                "ZBV"}),
    [](const auto& each) { return each.param.name; });

// The sums of tied embeddings and of the auxiliary loss have another order: their values are near.
TEST_F(PipelineRun, OfATiedEmbeddingIsNearTheRunWithout) {
  const Words tied{"--model.config", "tied.json"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, kMicroBatches, tied));
  for (const std::string schedule : {"1F1B", "ZBV"}) {
    ASSERT_NO_FATAL_FAILURE(
        train(schedule, 2, kMicroBatches, joined(as_pipeline(2, schedule), tied)));
    expect_near_numbers(schedule, "whole", kFloatNoise);
  }
}

TEST_F(PipelineRun, OfAnAuxiliaryLossHasItsGradientsBits) {
  const Words words{"--model.config", "moe.json", "--model.aux_loss_coef", "0.1"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, kMicroBatches, words));
  ASSERT_NO_FATAL_FAILURE(train("stages", 2, kMicroBatches, joined(as_pipeline(2, "ZB1P"), words)));
  EXPECT_TRUE(numbers(folder_ / "stages").at(0).contains("aux_loss"));
  expect_near_numbers("stages", "whole");
  expect_same_weights("stages", "whole");
}

struct Layout {
  std::string name;
  Words words;
  int data_ranks = 1;
};

TEST_F(PipelineRun, WithOtherAxesHasTheWeightsBits) {
  const Layout layouts[] = {
      {"sharded", {"--training.max_norm", "0"}, 2},
      {"replicas", {"--parallelism.data_parallel_replicate_degree", "2"}, 2},
      {"tensor", {"--parallelism.tensor_parallel_degree", "2", "--debug.check_placements", "true"}},
      {"experts", {"--parallelism.expert_parallel_degree", "2", "--model.config", "moe.json"}, 2}};
  for (const auto& [name, words, data_ranks] : layouts) {
    const int rows = kMicroBatches * data_ranks;
    const std::string whole = name + "-whole";
    const std::string schedule = name == "replicas" ? "ZBV" : "1F1B";
    ASSERT_NO_FATAL_FAILURE(train(whole, 2, rows, words));
    ASSERT_NO_FATAL_FAILURE(train(name, 4, rows, joined(as_pipeline(2, schedule), words)));
    expect_near_numbers(name, whole);
    expect_same_weights(name, whole);
  }
}

TEST_F(PipelineRun, OfAFileIsThatOfItsKind) {
  for (const std::string form : {"compute_only", "compute_comms"}) {
    succeeded(run_program(folder_, {"schedule", "ZBV", "--ranks", "2", "--micro-batches", "8",
                                    "--csv", form + ".csv", "--csv-form", form}));
    ASSERT_NO_FATAL_FAILURE(train(form, 2, kMicroBatches,
                                  {"--parallelism.pipeline_parallel_degree", "2",
                                   "--pipeline.schedule_file", form + ".csv"}));
  }
  ASSERT_NO_FATAL_FAILURE(train("kind", 2, kMicroBatches, as_pipeline(2, "ZBV")));
  expect_same_numbers("compute_only", "kind");
  expect_same_numbers("compute_comms", "kind");
  expect_same_weights("compute_comms", "kind");
}

/// A run that resumes from `from`; all steps again would give the same numbers.
class ResumedPipeline : public PipelineRun {
 protected:
  void resume(const std::string& run, int ranks, const std::string& schedule, int from, int to,
              const Words& more = {}) {
    const Words until =
        joined({"--training.steps", std::to_string(to), "--checkpoint.interval", "1"}, more);
    const Outcome outcome = succeeded(run_program(
        folder_, training(run, ranks, kMicroBatches,
                          joined(ranks == 1 ? Words{} : as_pipeline(ranks, schedule), until))));
    const std::string resumed = concat("checkpoint/step-", from, ", written by");
    EXPECT_EQ(outcome.err.find(resumed) != std::string::npos, from > 0) << outcome.err;
  }
};

TEST_F(ResumedPipeline, ResumesWithOtherNumbersOfStagesBitForBit) {
  ASSERT_NO_FATAL_FAILURE(resume("whole", 1, "", 0, 4));
  ASSERT_NO_FATAL_FAILURE(resume("moved", 2, "ZBV", 0, 1));
  EXPECT_TRUE(weights("moved", 1) == weights("whole", 1));
  ASSERT_NO_FATAL_FAILURE(resume("moved", 1, "", 1, 2));
  EXPECT_TRUE(weights("moved", 2) == weights("whole", 2));
  ASSERT_NO_FATAL_FAILURE(resume("moved", 4, "1F1B", 2, 3));
  ASSERT_NO_FATAL_FAILURE(resume("moved", 2, "Interleaved1F1B", 3, 4));
  expect_same_numbers("moved", "whole");
  expect_same_weights("moved", "whole");
}

/// Adapters, next to a model that no stage trains.
class AdaptersInStages : public ResumedPipeline {
 protected:
  /// Trains `config` whole, from whose weights adapters are then trained, without a pipeline and
  /// on 2, then 4 ranks of one. Dropout follows row and layer, wherever these are, and validation
  /// has none.
  void expect_their_bits(const std::string& config, const std::string& on_two) {
    ASSERT_NO_FATAL_FAILURE(train("base", 1, kMicroBatches, {"--model.config", config}));
    weights("base");
    std::string text = read_file(folder_ / "run.toml");
    constexpr std::string_view kModel = "config = \"model.json\"";
    text.replace(text.find(kModel), kModel.size(), "path = \"base-hf\"");
    folder_.write("run.toml", text);
    const Words lora{"--lora.rank",           "2",   "--lora.targets",     "q_proj",
                     "--lora.dropout",        "0.1", "--validation.path",  "held_out.txt",
                     "--validation.interval", "1",   "--validation.steps", "3"};
    ASSERT_NO_FATAL_FAILURE(resume("whole", 1, "", 0, kSteps, lora));
    ASSERT_NO_FATAL_FAILURE(resume("stages", 2, on_two, 0, 2, lora));
    ASSERT_NO_FATAL_FAILURE(resume("stages", 4, "1F1B", 2, kSteps, lora));
    expect_same_numbers("stages", "whole");
    EXPECT_TRUE(numbers(folder_ / "whole").back().contains("val_loss"));
    const std::string wanted = adapters("whole", kSteps);
    EXPECT_GT(wanted.size(), 1'000U);
    const std::string early = adapters("whole", 2);
    EXPECT_FALSE(early == wanted);
    EXPECT_TRUE(adapters("stages", 2) == early);
    EXPECT_TRUE(adapters("stages", kSteps) == wanted);
  }
};

TEST_F(AdaptersInStages, WithDropoutHaveTheirBits) { expect_their_bits("model.json", "ZBV"); }

// Both ends have the one embedding, and neither trains it.
TEST_F(AdaptersInStages, OfATiedEmbeddingHaveTheirBits) { expect_their_bits("tied.json", "ZB1P"); }

TEST_F(PipelineRun, LeavesACheckpointThatTheOtherCommandsReadAsAnyOther) {
  ASSERT_NO_FATAL_FAILURE(train("whole", 1, kMicroBatches, {}));
  ASSERT_NO_FATAL_FAILURE(train("stages", 2, kMicroBatches, as_pipeline(2, "ZBV")));
  const auto printed = [&](const std::string& run, Words words, const std::string& option) {
    if (!option.empty()) words.push_back(option);
    words.push_back(concat(run, "/checkpoint/step-", kSteps));
    return succeeded(run_program(folder_, words)).out;
  };
  const Words generate{"generate", "--prompt", "line", "--max-new-tokens", "24"};
  EXPECT_EQ(printed("stages", generate, "--model"), printed("whole", generate, "--model"));
  // In how many pieces a tensor lies is the layout's own.
  const auto tensors = [&](const std::string& run) {
    std::vector<std::string> lines;
    const auto all = nlohmann::json::parse(printed(run, {"inspect", "--json"}, "")).at("tensors");
    for (const auto& [name, one] : all.items()) {
      lines.push_back(concat(name, " ", one.at("dtype").dump(), one.at("shape").dump()));
    }
    return lines;
  };
  EXPECT_GT(tensors("stages").size(), 80U);
  EXPECT_EQ(tensors("stages"), tensors("whole"));
}

// Eight stages of a tied model: parameters of the first and the last all lie in the root.
TEST_F(PipelineRun, IsPlannedAlsoWhereAStageHasNoUnitOfItsOwn) {
  const Outcome outcome =
      succeeded(run_program(folder_, joined({"inspect", "--contract", "run.toml", "--model.config",
                                             "tied.json", "--training.global_batch_size", "8"},
                                            as_pipeline(4, "ZBV"))));
  EXPECT_THAT(outcome.out, Says("memory of a rank of each place", "pp 3"));
}

struct Refused {
  int ranks = 2;
  int rows = kMicroBatches;
  Words words;
  Words says;
};

// Some refusals come from the ranks, which have read the model and the data.
TEST_F(PipelineRun, ThatCannotBeIsRefusedWithItsNumbersAndLeavesNothing) {
  for (const auto& [name, ranks, micro_batches] :
       {std::tuple{"four.csv", "4", "8"}, std::tuple{"fewer.csv", "2", "7"}}) {
    ASSERT_EQ(run_program(folder_, {"schedule", "1F1B", "--ranks", ranks, "--micro-batches",
                                    micro_batches, "--csv", name})
                  .code,
              0);
  }
  folder_.write("twice.csv", "0F0,0F0,0B0\n1F0,1B0\n");
  folder_.write("no_schedule.csv", "hello,world\n");
  const auto pipeline = [](int ranks, const Words& more) {
    return joined({"--parallelism.pipeline_parallel_degree", std::to_string(ranks)}, more);
  };
  const Refused refusals[] = {
      {4, 3, pipeline(4, {}), {"1F1B on 4 ranks: found 3 micro-batches, expected at least 4"}},
      {2, 3, as_pipeline(2, "DualPipeV"), {"found 3 micro-batches", "expected at least 4"}},
      {2, 5, as_pipeline(2, "Interleaved1F1B"), {"found 5 micro-batches", "a multiple of 2"}},
      {2,
       8,
       pipeline(2, {"--pipeline.micro_batches", "4"}),
       {"pipeline.micro_batches: found 4, expected -1 or 8"}},
      {4,
       8,
       joined(as_pipeline(4, "ZBV"), {"--model.config", "short.json"}),
       {"pipeline.split: found 2 layers for 8 stages, expected at least 6"}},
      {3, 8, pipeline(2, {}), {"pipeline_parallel_degree 2", "does not divide 3 rank(s)"}},
      {2,
       8,
       pipeline(2, {"--pipeline.split", "[0,2,4]"}),
       {"pipeline.split: found the first layers of 3 stages, expected those of 2"}},
      {2, 8, pipeline(2, {"--pipeline.split", "[0,9]"}), {"pipeline.split: found stage 1", "of 8"}},
      {2,
       8,
       pipeline(2, {"--pipeline.stages_per_rank", "2"}),
       {"pipeline.stages_per_rank: found 2, expected 1"}},
      {2,
       8,
       pipeline(2, {"--pipeline.schedule_file", "four.csv"}),
       {"pipeline.schedule_file: found a schedule of 4 ranks", "expected one of 2"}},
      {2,
       8,
       pipeline(2, {"--pipeline.schedule_file", "fewer.csv"}),
       {"found a schedule of 7 micro-batches", "expected one of 8"}},
      {2,
       1,
       pipeline(2, {"--pipeline.schedule_file", "twice.csv"}),
       {"twice.csv', which is no valid schedule (repeated: rank 0, slot 1 (0F0)"}},
      {2,
       8,
       pipeline(2, {"--pipeline.schedule_file", "no_schedule.csv"}),
       {"no_schedule.csv', row 1, cell 1: found 'hello'"}},
      {2,
       8,
       joined(as_pipeline(2, "ZBV"), {"--pipeline.schedule_file", "fewer.csv"}),
       {"found ZBV and 'fewer.csv', expected one of them"}}};
  for (const auto& [ranks, rows, words, says] : refusals) {
    SCOPED_TRACE(says.front());
    const Outcome outcome = run_program(folder_, training("refused", ranks, rows, words));
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << "one line: " << outcome.err;
    for (const std::string& part : says) EXPECT_THAT(outcome.err, Says(part));
    EXPECT_FALSE(fs::exists(folder_ / "refused"));
  }
}

}  // namespace
}  // namespace tessera::cli::pipeline_test
