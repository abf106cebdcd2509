// Runs whose optimizer state lies outside of memory: the bits of runs without, checkpoints that go
// on with and without, and folders and disks that cannot take it.
#include <gmock/gmock.h>

#include <regex>

#include "cli/process.h"
#include "cli/same_bits.h"
#include "cli/saving_run.h"

namespace tessera::cli::offload_run_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryFolder;

/// write_small_run, with layers whose state is worth its buffers.
void write_run(const TemporaryFolder& folder) {
  write_small_run(folder);
  auto model = read_file(folder / "model.json");
  model = std::regex_replace(model, std::regex("\"hidden_size\": 16"), "\"hidden_size\": 128");
  model =
      std::regex_replace(model, std::regex("\"num_hidden_layers\": 1"), "\"num_hidden_layers\": 3");
  folder.write("model.json", model);
  fs::create_directory(folder / "out");
}

/// Behind the program: a plan for the least memory that any has.
Words with_least_memory(const TemporaryFolder& folder, const Words& more = {}) {
  Words ask{"plan",
            "run.toml",
            "--world",
            "2",
            "--compile.memory_budget",
            "1",
            "--compile.offload_folder",
            "out"};
  ask.insert(ask.end(), more.begin(), more.end());
  const Outcome below = run_program(folder, ask);
  std::smatch found;
  const bool is_said =
      std::regex_search(below.err, found, std::regex("expected at least ([0-9]+)"));
  EXPECT_TRUE(is_said) << below.err;
  Words words{"--compile.mode",           "plan", "--compile.memory_budget", found[1].str(),
              "--compile.offload_folder", "out"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

Words joined_words(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class OffloadedRun : public ::testing::TestWithParam<Words> {};
INSTANTIATE_TEST_SUITE_P(DTypes, OffloadedRun,
                         ::testing::Values(Words{},
                                           Words{"--precision.param_dtype", "bfloat16",
                                                 "--precision.storage_dtype", "bfloat16"}));

/// `more`: behind every command.
void expect_bits_of_one_in_memory(const TemporaryFolder& folder, const Words& more) {
  const auto offloads = with_least_memory(folder, more);
  const auto train = [&](const std::string& run, int steps, const Words& with) {
    Process process(folder.path(), joined_words(two_ranks(run, steps, 3), with));
    EXPECT_EQ(process.wait(kLong), 0) << process.err();
  };
  train("inside", 9, more);
  train("outside", 9, offloads);
  EXPECT_TRUE(fs::is_empty(folder / "out"));
  EXPECT_THAT(read_file(folder / "outside/metrics/metrics.jsonl"),
              AllOf(HasSubstr("\"offload_mib\":"), HasSubstr("\"offload_wait_ms\":")));
  EXPECT_THAT(read_file(folder / "inside/metrics/metrics.jsonl"), Not(HasSubstr("offload")));
  EXPECT_THAT(read_file(folder / "outside/metrics/profile.json"), HasSubstr("\"transfer\": {"));
  // Out and in again at each checkpoint.
  train("mixed", 3, offloads);
  train("mixed", 6, more);
  train("mixed", 9, offloads);
  EXPECT_EQ(losses(folder / "outside"), losses(folder / "inside"));
  EXPECT_EQ(losses(folder / "mixed"), losses(folder / "inside"));
  for (const auto* run : {"outside", "mixed"}) {
    expect_same_bits(store_of(folder, run), store_of(folder, "inside"), 9);
  }
}

TEST_P(OffloadedRun, HasTheBitsOfOneInMemoryAndGoesOnEitherWay) {
  const TemporaryFolder folder;
  write_run(folder);
  expect_bits_of_one_in_memory(folder, GetParam());
}

// All state is that of adapters: small, in units whose other parameters have none.
TEST(OffloadedRuns, OfAdaptersHaveTheBitsOfOneInMemoryAndGoOnEitherWay) {
  const TemporaryFolder folder;
  write_run(folder);
  Process base(folder.path(), two_ranks("base", 1, 1));
  ASSERT_EQ(base.wait(kLong), 0) << base.err();
  auto config = read_file(folder / "run.toml");
  config.replace(config.find("config = \"model.json\""), 21, "path = \"base\"");
  folder.write("run.toml", config);
  expect_bits_of_one_in_memory(folder, {"--lora.rank", "8", "--lora.targets", "*_proj"});
}

TEST(OffloadedRuns, AForecastCountsWhatIsOut) {
  const TemporaryFolder folder;
  write_run(folder);
  Words words{"inspect", "--contract", "run.toml", "--world", "2"};
  const auto without = run_program(folder, words).out;
  const auto with = run_program(folder, joined_words(words, with_least_memory(folder))).out;
  EXPECT_THAT(without, Not(HasSubstr("offloaded")));
  EXPECT_THAT(with, HasSubstr("in memory, instead of moments and master: state of "));
  const auto all = [](const std::string& text) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(text, found, std::regex("all of these +([0-9.]+ ?[A-Za-z]+)")));
    return found[1].str();
  };
  EXPECT_NE(all(with), all(without));
  const auto plan = run_program(
      folder,
      joined_words({"plan", "run.toml", "--world", "2", "--actions"}, with_least_memory(folder)));
  EXPECT_THAT(plan.out, AllOf(HasSubstr("is offloaded: the budget has no room for its "),
                              HasSubstr("update:\n  reload the optimizer state of "),
                              HasSubstr("optimizer state of a rank in memory: ")));
  // A plan that offloads wants a folder, and is followed with one.
  const auto file = run_program(folder, joined_words({"plan", "run.toml", "--world", "2", "--json"},
                                                     with_least_memory(folder)));
  folder.write("plan.json", file.out);
  Words follow{
      "train",          "run.toml", "--nproc",        "2",        "--job.dump_folder", "run",
      "--compile.mode", "plan",     "--compile.plan", "plan.json"};
  const auto refused = run_program(folder, follow);
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("set compile.offload_folder"));
  const auto followed =
      run_program(folder, joined_words(follow, {"--compile.offload_folder", "out"}));
  EXPECT_EQ(followed.code, 0) << followed.err;
  EXPECT_THAT(read_file(folder / "run/metrics/metrics.jsonl"), HasSubstr("\"offload_mib\":"));
}

TEST(OffloadedRuns, AFolderThatIsNoneOrADiskWithoutRoomEndsThemBeforeTheFirstStep) {
  const TemporaryFolder folder;
  write_run(folder);
  auto offloads = with_least_memory(folder);
  Process full(folder.path(),
               joined_words(two_ranks("full", 3, 3, {"prlimit", "--fsize=100000"}), offloads));
  EXPECT_EQ(full.wait(kLong), 2) << full.err();
  EXPECT_THAT(full.err(), AllOf(HasSubstr("out': optimizer state of rank "),
                                HasSubstr("no room for "), HasSubstr("File too large")));
  offloads.back() = "none";
  Process absent(folder.path(), joined_words(two_ranks("absent", 3, 3), offloads));
  EXPECT_EQ(absent.wait(kLong), 2) << absent.err();
  EXPECT_THAT(absent.err(), AllOf(HasSubstr("none': found no folder"), HasSubstr("rank ")));
  for (const auto* run : {"full", "absent"}) {
    EXPECT_EQ(read_file(folder / run / "metrics/metrics.jsonl"), "") << "no step was made";
  }
}

// In the midst of an update: the run ends on all ranks, the checkpoint before it is whole, and the
// same command without the fault goes on to the bits of the undisturbed run.
TEST(OffloadedRuns, ADiskThatBreaksEndsThemAndTheCheckpointBeforeStays) {
  const TemporaryFolder folder;
  write_run(folder);
  const auto command = joined_words(two_ranks("run", 8, 2), with_least_memory(folder));
  Process broken(
      folder.path(), command,
      {{"LD_PRELOAD", TESSERA_FAILING_READS}, {"TESSERA_TEST_READS_BEFORE_FAILURE", "100"}});
  EXPECT_EQ(broken.wait(kLong), 1) << broken.err();
  EXPECT_THAT(broken.err(), AllOf(HasSubstr("out': optimizer state of rank "),
                                  HasSubstr("reading failed (Input/output error)")));
  const auto last = store_of(folder, "run").latest();
  ASSERT_TRUE(last.has_value());
  CheckpointFolder::open(store_of(folder, "run").complete(*last)).verify_all();
  Process rest(folder.path(), command);
  ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
  Process whole(folder.path(), two_ranks("whole", 8, 2));
  ASSERT_EQ(whole.wait(kLong), 0) << whole.err();
  expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), 8);
}

}  // namespace
}  // namespace tessera::cli::offload_run_test
