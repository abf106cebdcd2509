// Whose optimizer state lies outside of memory: the least that makes a plan fit, and more of it
// where that saves time.
#include "capture/offload_pass.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "capture/passes.h"
#include "capture/plan_text.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"
#include "unit/capture/drawn_problem.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::offload_pass_test {
namespace {

using fsdp::Draw;
using fsdp::Keep;
using fsdp::ReduceAt;
using fsdp::StateBytes;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Names = std::vector<std::string>;

/// In parts of which eight or more make a chunk, so that two chunks take a quarter.
std::vector<StateBytes> state_of(const std::vector<std::int64_t>& bytes) {
  std::vector<StateBytes> state;
  for (const auto one : bytes) state.push_back({one, one / 100});
  return state;
}

/// The root of 10 bytes, which stays, around units of 20; state beside them.
PlanProblem problem_of(const std::vector<StateBytes>& state, std::int64_t micro_batches = 1) {
  PlanProblem problem;
  std::vector<fsdp::UnitId> all;
  std::vector<bool> resharded;
  problem.units = fsdp::units_of(state.size());
  for (fsdp::UnitId i = 0; i < state.size(); ++i) {
    problem.units[i].bytes = i == 0 ? 10 : 20;
    all.push_back(i);
    resharded.push_back(i != 0);
  }
  problem.record = fsdp::record_of({fsdp::flat(all)});
  problem.eager = eager_choices(problem.record, resharded, ReduceAt::kLastBackward, problem.order);
  problem.micro_batches = micro_batches;
  problem.profile = default_profile(problem.units);
  problem.state = state;
  return problem;
}

TEST(OffloadPass, TakesTheSmallestUnitThatIsEnoughElseTheOneThatBringsMost) {
  const auto state = state_of({800, 400, 1600, 400, 0});
  EXPECT_EQ(state_in_memory(state, {}), 3200);
  EXPECT_EQ(state_in_memory(state, {1}), 3200 - 400 + 100);
  EXPECT_THAT(offloaded_for(state, {}, 3200), IsEmpty());
  EXPECT_THAT(offloaded_for(state, {}, 3000), ElementsAre(3)) << "of equals the later one";
  EXPECT_THAT(offloaded_for(state, {}, 2800), ElementsAre(0));
  EXPECT_THAT(offloaded_for(state, {}, 2000), ElementsAre(2));
  EXPECT_THAT(offloaded_for(state, {}, 1800), ElementsAre(2, 3)) << "the largest, then enough";
  EXPECT_THAT(offloaded_for(state, {1}, 2800), ElementsAre(1, 3)) << "what is out stays out";
  EXPECT_THAT(offloaded_for(state, {}, 0), ElementsAre(0, 1, 2, 3)) << "as near as it comes";
}

// One large part costs two buffers of its size: alone it brings nothing, beside others it does.
TEST(OffloadPass, LooksBeyondAUnitThatAloneBringsNothing) {
  const std::vector<StateBytes> state{{100, 100}, {150, 100}, {150, 100}};
  EXPECT_EQ(state_in_memory(state, {0}), 500);
  EXPECT_EQ(state_in_memory(state, {1}), 450);
  EXPECT_THAT(offloaded_for(state, {}, 300), ElementsAre(1, 2));
  EXPECT_THAT(offloaded_for(state, {}, 200), ElementsAre(0, 1, 2));
  EXPECT_THAT(offloaded_for(std::vector<StateBytes>{{100, 100}}, {}, 50), IsEmpty());
}

TEST(OffloadPass, OffloadsWhatTheBudgetNeedsAndNoMore) {
  auto problem = problem_of(state_of({80, 400, 400}), 2);
  problem.memory_budget = 880 + 50;
  const auto all = choose(problem);
  EXPECT_THAT(all.choices.offload, IsEmpty());
  problem.memory_budget = 880;
  const auto some = choose(problem);
  EXPECT_THAT(some.choices.offload, ElementsAre(0)) << "30 bytes are gathered at least";
  EXPECT_THAT(some.offload_reasons[0], HasSubstr("no room for its 80 B"));
  EXPECT_THAT(some.notes, Contains(HasSubstr("only measured costs can say")));
  problem.memory_budget = least_bytes(problem);
  EXPECT_EQ(*problem.memory_budget, 30 + 220);
  EXPECT_THAT(choose(problem).choices.offload, ElementsAre(0, 1, 2));
  --*problem.memory_budget;
  EXPECT_THROW(choose(problem), Error);
  // Where passes are named and this one is not, state stays.
  problem.memory_budget = 880;
  EXPECT_THROW(choose(problem, Names{"keep"}), Error);
  EXPECT_EQ(least_bytes(problem, Names{"keep"}), 910);
}

TEST(OffloadPass, MakesRoomForWhatIsKeptWhereThatSavesMoreThanItCosts) {
  auto problem = problem_of(state_of({80, 400, 400}), 4);
  problem.profile.is_assumed = false;
  for (auto& unit : problem.profile.units) unit.gather_ms = 2.0;
  problem.memory_budget = 880 + 50;  // all but one layer of two fits
  problem.profile.transfer = CollectiveCost{.latency_ms = 0.0, .ms_per_byte = 0.01};
  const auto cheap = choose(problem);
  EXPECT_THAT(cheap.choices.keep, ::testing::Each(Keep::kUpdate));
  EXPECT_EQ(plan_of(problem, cheap).choices.offload, cheap.choices.offload);
  problem.memory_budget = 880 + 30;
  const auto more = choose(problem);
  EXPECT_THAT(more.choices.offload, Not(IsEmpty()));
  EXPECT_THAT(more.choices.keep, ::testing::Each(Keep::kUpdate));
  EXPECT_THAT(more.offload_reasons[more.choices.offload.front()],
              AllOf(HasSubstr("room to keep layer "), HasSubstr("of moving state")));
  problem.profile.transfer->ms_per_byte = 10.0;
  const auto dear = choose(problem);
  EXPECT_THAT(dear.choices.offload, IsEmpty());
  problem.profile.transfer.reset();
  problem.memory_budget = 880;
  EXPECT_THAT(choose(problem).notes, Contains(HasSubstr("to move optimizer state is assumed")));
}

TEST(OffloadPass, UpdatesReloadOneUnitAheadAndTextsSayWhy) {
  auto problem = problem_of(state_of({80, 400, 400}), 2);
  problem.memory_budget = least_bytes(problem);
  const auto chosen = choose(problem);
  const auto plan = plan_of(problem, chosen);
  std::string actions;
  for (const auto& [kind, unit] : plan.update) actions += concat(to_string(kind), " ", unit, ", ");
  EXPECT_EQ(actions, "reload 0, reload 1, offload 0, reload 2, offload 1, offload 2, ");
  EXPECT_THAT(to_text(plan, chosen, 2),
              HasSubstr("update:\n  reload the optimizer state of the root (while "));
  EXPECT_THAT(choices_text(plan, chosen),
              HasSubstr("optimizer state of layer 2 is offloaded: the budget has no room for"));
  // What an edited file could say.
  auto other = plan;
  std::swap(other.update[1], other.update[2]);
  EXPECT_THAT(fsdp::faults_of(other),
              Contains(HasSubstr("an update that does not bring and take")));
  other = plan;
  other.choices.offload = {1, 0, 2};
  EXPECT_THAT(fsdp::faults_of(other), Contains(HasSubstr("not in their order")));
  other = plan;
  other.stages[0].micro_batches[0].forward.actions[0].kind = fsdp::PlanAction::Kind::kOffload;
  EXPECT_THAT(fsdp::faults_of(other), Contains(HasSubstr("whose optimizer state is the update's")));
  other = plan;
  other.choices.offload = {0, 1};
  EXPECT_NE(plan.hash(), other.hash());
}

TEST(OffloadPass, ProfilesHaveWhatTransfersTookOfTheSlowestRank) {
  const auto problem = problem_of(state_of({80, 400, 400}));
  auto fast = problem.profile, slow = problem.profile;
  fast.is_assumed = slow.is_assumed = false;
  EXPECT_EQ(parse_profile(to_json(slow), "profile"), slow) << "nothing was moved";
  fast.transfer = CollectiveCost{.latency_ms = 0.5, .ms_per_byte = 1e-7};
  slow.transfer = CollectiveCost{.latency_ms = 0.25, .ms_per_byte = 3e-7};
  EXPECT_EQ(parse_profile(to_json(slow), "profile"), slow);
  slow.units[0].backward_ms += 1.0;
  EXPECT_EQ(slowest_of({fast, slow}).transfer, slow.transfer);
  EXPECT_EQ(profile_of(slow, problem.units, "profile").transfer, slow.transfer);
}

// Whatever state, units, traces, budgets and costs: within the budget, the same every time, nothing
// offloaded where all fits, and nobody refused who could be served.
TEST(OffloadPass, DrawnProblemsStayWithinTheirBudgets) {
  int refusals = 0, offloading = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    Draw draw(seed);
    const auto count = 1 + draw.below(6);
    auto problem = drawn_problem(draw, count, ReduceAt::kLastBackward);
    problem.form = draw.coin() ? Form::k3 : Form::k1;
    problem.profile.is_assumed = draw.coin();
    if (draw.coin()) {
      problem.profile.transfer =
          CollectiveCost{.ms_per_byte = static_cast<double>(draw.below(100)) / 1000.0};
    }
    auto& state = problem.state.emplace();
    for (std::size_t i = 0; i < count; ++i) {
      const auto bytes = static_cast<std::int64_t>(draw.below(200));
      state.push_back({bytes, bytes / static_cast<std::int64_t>(1 + draw.below(12))});
    }
    problem.memory_budget = static_cast<std::int64_t>(draw.below(500));
    try {
      const auto chosen = choose(problem);
      ASSERT_EQ(choose(problem), chosen) << seed;
      const auto plan = plan_of(problem, chosen);
      const auto& offload = chosen.choices.offload;
      const auto in_memory = state_in_memory(state, offload);
      ASSERT_THAT(fsdp::faults_of(plan, *problem.memory_budget - in_memory), IsEmpty()) << seed;
      ASSERT_LE(in_memory, state_in_memory(state, {})) << seed;
      for (const auto unit : offload) {
        ASSERT_GT(state[unit].bytes, 0) << seed;
        ASSERT_THAT(chosen.offload_reasons[unit], Not(IsEmpty())) << seed;
      }
      auto alone = problem;
      alone.state.reset();
      *alone.memory_budget -= state_in_memory(state, {});
      const bool fits = *alone.memory_budget >= least_bytes(alone);
      if (fits && problem.profile.is_assumed) {
        ASSERT_THAT(offload, IsEmpty()) << seed;
      }
      offloading += offload.empty() ? 0 : 1;
    } catch (const Error& error) {
      ++refusals;
      ASSERT_THAT(error.what(), HasSubstr("compile.memory_budget")) << seed;
      ASSERT_LT(*problem.memory_budget, least_bytes(problem)) << seed;
    }
  }
  EXPECT_GT(refusals, 20);
  EXPECT_GT(offloading, 100);
}

}  // namespace
}  // namespace tessera::capture::offload_pass_test
