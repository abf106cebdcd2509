// The files that a training run leaves, on one rank and on two.

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/golden_run.h"
#include "cli/program.h"
#include "support/test.h"
#include "train/config/config.h"

namespace tessera::cli::run_test {
namespace {

using ::testing::MatchesRegex;

std::vector<nlohmann::ordered_json> read_metrics(const std::filesystem::path& run) {
  std::vector<nlohmann::ordered_json> lines;
  std::istringstream text(read_file(run / "metrics" / "metrics.jsonl"));
  for (std::string line; std::getline(text, line);)
    lines.push_back(nlohmann::ordered_json::parse(line));
  return lines;
}

std::vector<std::filesystem::path> runs_of(const TemporaryFolder& folder) {
  std::vector<std::filesystem::path> runs;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "outputs")) {
    runs.push_back(entry.path());
  }
  std::ranges::sort(runs);
  return runs;
}

// Naive: oneDNN leaves out the parts of bf16 products whose threads the limit does not grant.
TEST(TrainCommand, ALimitBelowTheThreadsChangesNoBit) {
  std::vector<std::vector<std::pair<double, double>>> found;
  for (const std::string set : {"OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2 OMP_THREAD_LIMIT=1"}) {
    const TemporaryFolder folder;
    write_golden_run(folder);
    succeeded(
        run_program(folder, {"train", "run.toml", "--precision.param_dtype", "bfloat16"}, set));
    found.push_back(losses_and_norms(folder));
    EXPECT_EQ(found.back().size(), 6U);
  }
  EXPECT_EQ(found[0], found[1]);
}

TEST(TrainCommand, LeavesConfigMetricsAndLogs) {
  const SmallRun folder;
  const Outcome outcome =
      succeeded(run_program(folder, {"train", "run.toml", "--metrics.log_freq", "2"}));
  ASSERT_EQ(runs_of(folder).size(), 1u);
  const auto run = runs_of(folder).front();
  EXPECT_TRUE(run.filename().string().ends_with("-run"));

  const auto metrics = read_metrics(run);
  ASSERT_EQ(metrics.size(), 3u);
  std::vector<std::string> keys;
  for (const auto& [key, value] : metrics[0].items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"step", "loss", "grad_norm", "lr", "step_ms", "tps",
                                            "tps_global", "tflops", "peak_rss_mib"}));
  EXPECT_EQ(metrics[2]["step"], 3);
  EXPECT_NEAR(metrics[0]["loss"].get<double>(), std::log(260.0), 0.1);  // small weights: uniform

  EXPECT_THAT(outcome.out, StartsWith("step:  2  loss: "));  // steps 2 and 3, nothing else
  EXPECT_EQ(std::ranges::count(outcome.out, '\n'), 2);
  EXPECT_THAT(read_file(run / "logs" / "rank_0.log"), Says("run folder"));
  EXPECT_EQ(read_file(run / "checkpoint" / "latest"), "step-3") << "the last step is saved";
  std::vector<std::string> of_checkpoints;
  std::istringstream said(outcome.err);
  for (std::string line; std::getline(said, line);) {
    if (line.find("checkpoint") != std::string::npos) of_checkpoints.push_back(line);
  }
  EXPECT_THAT(of_checkpoints,
              ElementsAre(MatchesRegex(".* info checkpoint of step 3: written, [0-9.]+ MiB in "
                                       "[0-9.]+ m?s; training waited [0-9.]+ m?s")));

  const train::Config config = train::load_config((run / "config.toml").string());
  EXPECT_EQ(config.metrics.folder, run / "metrics");
  EXPECT_EQ(config.checkpoint.folder, run / "checkpoint");
  EXPECT_EQ(config.metrics.log_freq, 2);
}

/// The banner's lines without the time in front, and warnings.
std::vector<std::string> said_before_steps(const std::string& err) {
  std::vector<std::string> lines;
  std::istringstream text(err);
  for (std::string line; std::getline(text, line);) {
    for (const std::string level : {" info ", " warning "}) {
      const auto at = line.find(level);
      if (at != std::string::npos) lines.push_back(line.substr(at + level.size()));
    }
  }
  return lines;
}

// A run says what it is about to do once, on rank 0, with any number of ranks.
TEST(TrainCommand, SaysWhatItWillDoBeforeStepOne) {
  const SmallRun folder;
  const Outcome outcome =
      succeeded(run_program(folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder",
                                     "run", "--training.local_batch_size", "1"}));
  auto lines = said_before_steps(outcome.err);
  for (std::string& line : lines) {
    if (line.starts_with("[rank 0] ")) line.erase(0, 9);
  }
  const auto first = std::ranges::find_if(
      lines, [](const auto& line) { return line.starts_with("parameters  "); });
  ASSERT_GE(lines.end() - first, 6) << outcome.err;
  // 260 x 16 twice, attention 16 x (16 + 8 + 8 + 16), 3 x 16 x 32, norms 3 x 16 + 2 x 8.
  EXPECT_EQ(first[0], "parameters  10.7 k, trained all");
  EXPECT_EQ(first[1], "layout      2 ranks, dp_shard 2");
  EXPECT_EQ(first[2],
            "tokens      64 a step: 4 rows of 16, in 2 micro-batches of at most 1 a rank");
  EXPECT_EQ(first[3], "dtypes      storage float32; compute float32; reduce float32");
  EXPECT_EQ(first[4], "steps       1 to 3");
  EXPECT_THAT(first[5], StartsWith("device      cpu, "));
  const std::string where = "run folder  " + (folder / "run").string();
  EXPECT_EQ(std::count(lines.begin(), first, where), 1) << outcome.err;
  EXPECT_EQ(std::count(first, lines.end(), where), 0) << outcome.err;
  EXPECT_EQ(outcome.err.find("parameters  "), outcome.err.rfind("parameters  "));
  EXPECT_THAT(read_file(folder / "run/logs/rank_0.log"), Says("steps       1 to 3"));

  const Outcome further = run_program(
      folder, {"train", "run.toml", "--job.dump_folder", "run", "--training.steps", "4"});
  EXPECT_THAT(further.err, Says("steps       4 to 4")) << "after a resumption";
}

bool machine_has_bf16() {
  std::istringstream words(read_file("/proc/cpuinfo"));
  for (std::string word; words >> word;) {
    if (word == "avx512_bf16" || word == "bf16") return true;
  }
  return false;
}

// bf16 that is emulated, and rows that the model was not made for, are logged once with their keys.
TEST(TrainCommand, WarnsOfWhatIsMostLikelyNotMeant) {
  const SmallRun folder;
  const auto said = [&](const std::vector<std::string>& more) {
    return succeeded(run_program(folder, joined({"train", "run.toml", "--nproc", "2",
                                                 "--checkpoint.enable", "false"},
                                                more)))
        .err;
  };
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  const std::string narrow =
      said({"--precision.param_dtype", "bfloat16", "--training.seq_len", "64"});
  EXPECT_EQ(count(narrow, "set precision.param_dtype = \"float32\""), machine_has_bf16() ? 0 : 1)
      << narrow;
  EXPECT_EQ(count(narrow, "max_position_embeddings"), 0) << narrow;
  const std::string longer = said({"--training.seq_len", "65"});
  EXPECT_EQ(count(longer,
                  "training.seq_len: found rows of 65 tokens, more than "
                  "max_position_embeddings 64 of '" +
                      (folder / "model.json").string() + "'"),
            1)
      << longer;
}

TEST(TrainCommand, TheRunsOwnConfigRepeatsItBitForBit) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "one",
                                 "--checkpoint.enable", "false"})
                .code,
            0);
  const auto first = read_metrics(folder / "one");
  succeeded(run_program(folder, {"train", "one/config.toml"}));
  const auto second = read_metrics(folder / "one");
  ASSERT_EQ(second.size(), first.size()) << "a new run truncates metrics.jsonl";
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(second[i]["loss"], first[i]["loss"]);
}

TEST(TrainCommand, TwoLocalRanksTrainAsOneDoes) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "one"}).code, 0);
  const Outcome two = succeeded(
      run_program(folder, {"train", "run.toml", "--job.dump_folder", "two", "--nproc", "2"}));
  const auto expected = read_metrics(folder / "one");
  const auto found = read_metrics(folder / "two");
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    // fp32 sums in another order: a few units in the last place of a loss of about 5.6.
    EXPECT_NEAR(found[i]["loss"].get<double>(), expected[i]["loss"].get<double>(), 1e-5);
  }
  EXPECT_EQ(std::ranges::count(two.out, '\n'), 3) << "step lines of rank 0 only";
  EXPECT_THAT(read_file(folder / "two" / "logs" / "rank_1.log"), Says("[rank 1]"));
}

// libtorch seeds the generator of each process for itself; `train` gives all of them debug.seed.
TEST(TrainCommand, RanksOfTensorParallelismInProcessesAgreeOnWhatTheGuardCompares) {
  const SmallRun folder;
  const Outcome outcome = succeeded(
      run_program(folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder", "run",
                           "--parallelism.tensor_parallel_degree", "2", "--debug.guard", "1"}));
  EXPECT_EQ(std::ranges::count(outcome.out, '\n'), 3) << outcome.out;
}

TEST(TrainCommand, ATraceHasAllRanksOnOneClock) {
  const SmallRun folder;
  const Outcome outcome =
      succeeded(run_program(folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder",
                                     "run", "--metrics.trace_steps", "[2]"}));
  EXPECT_THAT(outcome.err, Says("trace of step 2: "));
  const auto trace = nlohmann::json::parse(read_file(folder / "run/metrics/trace/step-2.json"));
  std::map<int, std::pair<double, double>> steps;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] != "step 2") continue;
    const double begin = event["ts"];
    steps[event["pid"]] = {begin, begin + event["dur"].get<double>()};
  }
  ASSERT_EQ(steps.size(), 2U);
  // Both have begun before either has ended: the step's collectives are between them.
  EXPECT_LT(std::max(steps[0].first, steps[1].first), std::min(steps[0].second, steps[1].second));
}

TEST(TrainCommand, ErrorsOfRanksComeOnceAtTheEnd) {
  const SmallRun folder;
  const Outcome outcome =
      run_program(folder, {"train", "run.toml", "--nproc", "2", "--data.path", "absent.txt"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  const std::string last = outcome.err.substr(outcome.err.rfind('\n', outcome.err.size() - 2) + 1);
  EXPECT_THAT(last, StartsWith("rank "));
  EXPECT_THAT(last, Says("absent.txt"));
  EXPECT_EQ(outcome.err.find("absent.txt"), outcome.err.rfind("absent.txt")) << outcome.err;
}

TEST(TrainCommand, PrintConfigShowsOverridesAndStartsNothing) {
  const SmallRun folder;
  const Outcome outcome = succeeded(
      run_program(folder, {"train", "run.toml", "--print-config", "--training.steps", "7"}));
  EXPECT_EQ(train::parse_config(outcome.out, "stdout").training.steps, 7);
  EXPECT_FALSE(std::filesystem::exists(folder / "outputs"));
}

TEST(Program, HelpAndVersionGoToStdout) {
  const TemporaryFolder folder;
  const Outcome help = succeeded(run_program(folder, {"--help"}));
  EXPECT_THAT(help.out, Says("Train the model that a TOML file describes, or resume"));
  EXPECT_EQ(help.err, "");
  const Outcome keys = succeeded(run_program(folder, {"--help-keys", "training"}));
  EXPECT_THAT(keys.out, Says("training.seq_len  integer (tokens), required"));
  const Outcome version = succeeded(run_program(folder, {"--version"}));
  EXPECT_THAT(version.out, Says("git ", "torch 2.", "gloo"));
}

struct StandardOutput {
  std::string name;
  std::string redirection;
};

class LostOutput : public ::testing::TestWithParam<StandardOutput> {};

// A full disk, and a closed descriptor: neither may look like success of a verb that was asked for
// its output. A run continues (unread_output_test.cpp).
TEST_P(LostOutput, IsAFailureOfEveryVerbThatPrintsItsResult) {
  const SmallRun folder;
  const std::string model = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  const std::vector<std::vector<std::string>> commands{
      {"--help"},
      {"--version"},
      {"train", "--help"},
      {"--help-keys"},
      {"train", "run.toml", "--print-config"},
      {"inspect", model},
      {"inspect", model, "--json"},
      {"inspect", "--contract", "run.toml"},
      {"convert", model, "converted"},
      {"generate", "--model", model, "--prompt-tokens", "1,2", "--max-new-tokens", "4"}};
  for (const auto& words : commands) {
    const Outcome outcome = run_program(folder, words, "", GetParam().redirection);
    EXPECT_EQ(outcome.code, 1) << words.front() << "\n" << outcome.err;
    EXPECT_THAT(outcome.err, Says("stdout: ")) << words.front();
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "converted/config.json")) << "it was complete";
}

TEST_P(LostOutput, IsNoMatterWhereNothingIsPrinted) {
  const TemporaryFolder folder;
  const std::string model = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  succeeded(run_program(
      folder,
      {"gradients", "--model", model, "--batch", model + "/reference.safetensors", "--out", "g"},
      "", GetParam().redirection));
}

INSTANTIATE_TEST_SUITE_P(Program, LostOutput,
                         ::testing::Values(StandardOutput{"FullDisk", "> /dev/full"},
                                           StandardOutput{"Closed", ">&-"}),
                         [](const auto& one) { return one.param.name; });

// Two rows in two pieces are two micro-batches of a row; in four, two that are empty change
// nothing.
TEST(GradientsCommand, MicroBatchesCutARanksRowsByCount) {
  const TemporaryFolder folder;
  const std::string model = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  const auto gradients = [&](const std::string& out, const std::vector<std::string>& more) {
    succeeded(run_program(folder, joined({"gradients", "--model", model, "--batch",
                                          model + "/reference.safetensors", "--out", out},
                                         more)));
    return read_file(folder / out);
  };
  const auto one_row = gradients("rows", {"--training.local_batch_size", "1"});
  EXPECT_TRUE(gradients("two", {"--pipeline.micro_batches", "2"}) == one_row);
  EXPECT_TRUE(gradients("four", {"--pipeline.micro_batches", "4"}) == one_row);
  EXPECT_FALSE(gradients("one", {"--pipeline.micro_batches", "1"}) == one_row)
      << "other products, other roundings";
}

}  // namespace
}  // namespace tessera::cli::run_test
