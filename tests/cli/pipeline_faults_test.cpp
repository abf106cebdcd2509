// A rank of a pipeline is killed, stops or throws at a random moment of the steps: every process is
// gone within 20 s of the event, or of the timeout; the others say in which slot they waited for
// whom; and what was saved before resumes without the pipeline, with its bits. Asked to stop, all
// stages stop after the same step.
//
// A step has many micro-batches, so that a moment is most often in one of its slots. Without a
// pipeline: lost_rank_test.cpp, checkpoint_test.cpp.
#include <signal.h>

#include <chrono>
#include <random>
#include <regex>
#include <thread>

#include "cli/pipeline_run.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::pipeline_faults_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;

constexpr int kMicroBatches = 48;
constexpr seconds kLong{120};
constexpr seconds kGone{20};    // 5 s of them grace for a stopped rank, on a busy machine
constexpr seconds kTimeout{3};  // of a collective or message

struct Case {
  int number = 0;
  int ranks = 2;
  std::string schedule;
  int victim = 0;
  milliseconds moment{0};  ///< after the first step
};

std::string to_string(const Case& one) {
  return concat("case ", one.number, ": rank ", one.victim, " of ", one.ranks, ", ", one.schedule,
                ", ", one.moment.count(), " ms after the first step");
}

/// The same in every run of the test.
std::vector<Case> random_cases(unsigned seed, int in_short) {
  const char* const schedules[] = {
      "1F1B",      "ZBV", "DualPipeV", "Interleaved1F1B", "ZB1P", "GPipe", "InterleavedZeroBubble",
      "Paired1F1B"};
  std::mt19937 random(seed);
  std::vector<Case> cases;
  const int count = test::full_proof() ? 20 : in_short;
  for (int i = 0; i < count; ++i) {
    Case one{i, random() % 2 == 0 ? 2 : 4, schedules[random() % std::size(schedules)]};
    one.victim = static_cast<int>(random()) & (one.ranks - 1);
    one.moment = milliseconds(random() % 1500);
    cases.push_back(std::move(one));
  }
  return cases;
}

/// A training that does not end by itself.
Words endless(const Case& one, const Words& more = {}) {
  const Words program{TESSERA_PROGRAM};
  const Words options{"--training.steps",       "1000000",
                      "--metrics.log_freq",     "1000000",
                      "--comm.timeout_seconds", std::to_string(kTimeout.count())};
  return joined(program,
                training("run", one.ranks, kMicroBatches,
                         joined(joined(as_pipeline(one.ranks, one.schedule), options), more)));
}

class Victim {
 public:
  explicit Victim(const Case& one, const Words& more = {}, const Variables& set = {})
      : one_(one), run_(folder_.path(), endless(one, more), set) {}

  const TemporaryFolder& folder() const { return folder_; }
  Process& run() { return run_; }

  /// Until a step is done; then to the moment. The processes of the ranks.
  std::map<int, pid_t> in_the_steps() {
    const auto ranks = run_.wait_for_ranks(static_cast<std::size_t>(one_.ranks));
    EXPECT_EQ(ranks.size(), static_cast<std::size_t>(one_.ranks)) << run_.err();
    EXPECT_TRUE(wait_until(kLong, [&] { return !losses(folder_ / "run").empty(); })) << run_.err();
    std::this_thread::sleep_for(one_.moment);
    return ranks;
  }

  /// Lines of other ranks than the victim that name a slot; all of them wait for it in the end.
  std::size_t expect_blamed() {
    const std::string victim = concat("rank ", one_.victim);
    const std::regex blames("(lost|waited [0-9]+ s for) (rank [0-9]+)");
    const std::string text = run_.err();
    for (std::sregex_iterator found(text.begin(), text.end(), blames), end; found != end; ++found) {
      EXPECT_EQ((*found)[2].str(), victim) << text;
    }
    return lines_with(text, ", micro-batch ").size();
  }

 private:
  const Case one_;
  PipelineFolder folder_;
  Process run_;
};

void expect_all_gone(const std::map<int, pid_t>& ranks) {
  for (const auto& [rank, pid] : ranks) EXPECT_FALSE(alive(pid)) << "rank " << rank;
}

/// The weights that `convert` writes for a step.
std::string weights(const TemporaryFolder& folder, const std::string& run, std::int64_t step) {
  const std::string out = run + "-hf";
  succeeded(run_program(
      folder, {"convert", concat(run, "/checkpoint/step-", step), out, "--dtype", "auto"}));
  return read_file(folder / (out + "/model.safetensors"));
}

/// Resumes what was saved for two steps on one rank; its losses and weights are those of a run that
/// knew no pipeline.
void expect_goes_on_without(const TemporaryFolder& folder, std::int64_t saved) {
  for (const std::string run : {"run", "whole"}) {
    const Outcome outcome = succeeded(run_program(
        folder, training(run, 1, kMicroBatches, {"--training.steps", std::to_string(saved + 2)})));
    const bool resumed = outcome.err.find("written by") != std::string::npos;
    EXPECT_EQ(resumed, run == "run") << outcome.err;
  }
  EXPECT_EQ(numbers(folder / "run"), numbers(folder / "whole"));
  EXPECT_TRUE(weights(folder, "run", saved + 2) == weights(folder, "whole", saved + 2));
}

TEST(LostStage, KilledInItsStepsIsNamedNoRankStaysAndTheRunContinuesWithout) {
  const auto cases = random_cases(18, 3);
  std::size_t named = 0;
  for (const Case& one : cases) {
    SCOPED_TRACE(to_string(one));
    Victim victim(one, {"--checkpoint.interval", "1"});
    const auto ranks = victim.in_the_steps();
    ASSERT_FALSE(::testing::Test::HasFailure());
    const auto store = store_of(victim.folder(), "run");
    if (one.number == 0) {
      ASSERT_TRUE(wait_until(kLong, [&] { return store.latest().has_value(); }));
    }
    kill(ranks.at(one.victim), SIGKILL);
    EXPECT_EQ(victim.run().wait(kGone), 128 + SIGKILL) << victim.run().err();
    EXPECT_EQ(victim.run().last_error_line(),
              concat("rank ", one.victim, ": killed by signal 9 (SIGKILL)"));
    named += victim.expect_blamed() > 0 ? 1 : 0;
    expect_all_gone(ranks);
    if (one.number > 0) continue;
    const auto latest = store.latest();
    ASSERT_TRUE(latest.has_value());
    CheckpointFolder::open(store.complete(*latest)).verify_all();
    expect_goes_on_without(victim.folder(), *latest);
  }
  EXPECT_GE(named, cases.size() / 2) << "most moments are in a slot";
}

TEST(LostStage, StoppedInItsStepsIsNamedAndNoRankStaysAfterTheTimeout) {
  const auto cases = random_cases(19, 2);
  std::size_t named = 0;
  for (const Case& one : cases) {
    SCOPED_TRACE(to_string(one));
    Victim victim(one);
    const auto ranks = victim.in_the_steps();
    ASSERT_FALSE(::testing::Test::HasFailure());
    kill(ranks.at(one.victim), SIGSTOP);
    EXPECT_EQ(victim.run().wait(kTimeout + kGone), 1) << victim.run().err();
    EXPECT_THAT(victim.run().last_error_line(), Says(concat("rank ", one.victim)));
    named += victim.expect_blamed() > 0 ? 1 : 0;
    expect_all_gone(ranks);
  }
  EXPECT_GE(named, cases.size() / 2) << "most moments are in a slot";
}

// As memory that runs out in a slot.
TEST(LostStage, ThatThrowsIsNamedWithItsSlotAndNoRankStays) {
  const auto cases = random_cases(20, 2);
  std::size_t named = 0;
  for (Case one : cases) {
    one.moment += milliseconds(3000);  // after the start of the processes
    SCOPED_TRACE(to_string(one));
    Victim victim(one, {},
                  {{"LD_PRELOAD", TESSERA_FAILING_ALLOCATOR},
                   {"TESSERA_TEST_FAIL_RANK", std::to_string(one.victim)},
                   {"TESSERA_TEST_FAIL_AFTER_MS", std::to_string(one.moment.count())}});
    const auto ranks = victim.run().wait_for_ranks(static_cast<std::size_t>(one.ranks));
    ASSERT_TRUE(wait_until(kLong, [&] { return exists(victim.folder() / "failed"); }))
        << victim.run().err();
    EXPECT_EQ(victim.run().wait(kGone), 1) << victim.run().err();
    EXPECT_THAT(victim.run().last_error_line(), Says(concat("rank ", one.victim, ": "), "memory"));
    const std::regex slot(concat("pipeline, rank ", one.victim,
                                 ", slot [^ ]+ \\(stage [0-9]+, micro-batch [0-9]+\\)"));
    named += std::regex_search(victim.run().last_error_line(), slot) ? 1 : 0;
    expect_all_gone(ranks);
  }
  EXPECT_GE(named, cases.size() / 2) << "most moments are in a slot";
}

TEST(StagesAskedToStop, SaveTheSameStepAndResumeWithout) {
  for (const Case& one : {Case{0, 2, "ZBV", 1}, Case{1, 4, "1F1B", 2}}) {
    SCOPED_TRACE(to_string(one));
    Victim asked(one);
    const auto ranks = asked.in_the_steps();
    ASSERT_FALSE(::testing::Test::HasFailure());
    ::kill(one.number == 0 ? ranks.at(one.victim) : asked.run().pid(), SIGTERM);
    ASSERT_EQ(asked.run().wait(kLong), 0) << asked.run().err();
    const auto steps = static_cast<std::int64_t>(losses(asked.folder() / "run").size());
    EXPECT_THAT(store_of(asked.folder(), "run").steps(), ElementsAre(steps));
    CheckpointFolder::open(store_of(asked.folder(), "run").complete(steps)).verify_all();
    expect_goes_on_without(asked.folder(), steps);
  }
}

}  // namespace
}  // namespace tessera::cli::pipeline_faults_test
