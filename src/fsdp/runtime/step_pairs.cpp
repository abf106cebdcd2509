// Runs a forward while a backward runs, inside a step scope. [Note: pairs] in open_step.h
#include <exception>
#include <functional>
#include <string>

#include "base/doing.h"
#include "comm/turns.h"
#include "fsdp/runtime/open_step.h"
#include "fsdp/runtime/runtime.h"
#include "grad/pair_accumulators.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Gives `place` the value while this object lives, and T() afterwards.
template <class T>
class Meanwhile {
 public:
  Meanwhile(T& place, T value) : place_(place) { place_ = value; }
  ~Meanwhile() { place_ = T(); }
  Meanwhile(const Meanwhile&) = delete;
  Meanwhile& operator=(const Meanwhile&) = delete;

 private:
  T& place_;
};

/// Clears UnitHere when a pair has failed: its caller is then in no unit and no step, whichever of
/// the two call stacks has set them.
class LeavesLabels {
 public:
  explicit LeavesLabels(const Runtime& runtime) : runtime_(runtime) {}
  ~LeavesLabels() {
    if (!runtime_.has_failed()) return;
    UnitHere::leave_step();
    UnitHere::enter(std::string_view());
  }
  LeavesLabels(const LeavesLabels&) = delete;
  LeavesLabels& operator=(const LeavesLabels&) = delete;

 private:
  const Runtime& runtime_;
};

}  // namespace

/// Returns why the two run one after the other, the same on every rank; empty where they overlap.
std::string OpenStep::why_in_turn(int forward_stage, int backward_stage) const {
  if (runtime_.planning().planner) return "a planner chooses what is computed again";
  if (!ranks_turn_alike_) return "ranks have other numbers of exchanges in a pass";
  if (turns_.draws) return "checkpoints draw random numbers of the process";
  const auto& forward = turns_.stages[static_cast<std::size_t>(forward_stage)].forward;
  const auto& backward = turns_.stages[static_cast<std::size_t>(backward_stage)].backward;
  if (!forward || !backward) return "micro-batches have other numbers of exchanges";
  return "";
}

void OpenStep::run_pair(const StepForward& forward, const StepBackward& backward) {
  constexpr auto kWhat = "StepScope::run_pair";
  require_open(kWhat);
  TESSERA_CHECK(!comm::Turns::under_way(), ErrorKind::kUsage, kWhat,
                ": found a pair of another model under way, expected it to end before");
  asked_for_pairs_ = true;
  TESSERA_CHECK(
      !options_.micro_batches, ErrorKind::kUsage, kWhat,
      ": found StepScopeOptions::micro_batches, which says that a forward comes after the "
      "backwards of all before it, expected none; leave it out and call reduce()");
  end_action();
  // These checks come before anything of the forward begins.
  stage_of(forward.stage, kWhat);
  require_may_run_backward(backward.stage, backward.micro_batch, backward.backward, kWhat);
  const auto why = records_ ? std::string() : why_in_turn(forward.stage, backward.stage);
  if (!why.empty()) runtime_.warn_of_no_pairs(why);
  if (!records_ && why.empty()) return run_overlapped(forward, backward);
  // The backward runs first: it frees its activations before the forward keeps its own.
  begin_backward(backward.stage, backward.micro_batch, backward.backward);
  {
    const Meanwhile inside(inside_pair_, true);
    call_of_pair(backward.stage, backward.micro_batch, backward.run);
  }
  begin_forward(forward.stage, forward.micro_batch);
  const Meanwhile inside(inside_pair_, true);
  call_of_pair(forward.stage, forward.micro_batch, forward.run);
}

/// Runs one function of a pair. Its exception ends the step before the other function is unwound.
void OpenStep::call_of_pair(int stage, std::int64_t micro_batch, const std::function<void()>& run) {
  UnitHere::enter(stage, static_cast<std::uint32_t>(micro_batch));
  try {
    run();
  } catch (const comm::Turns::Ended&) {
    throw;
  } catch (const std::exception& error) {
    if (!runtime_.has_failed()) runtime_.fail(error.what());
    throw;
  }
}

void OpenStep::run_overlapped(const StepForward& forward, const StepBackward& backward) {
  start_forward(forward.stage, forward.micro_batch);
  const auto forward_as_text = action_as_text();
  start_backward(backward.stage, backward.micro_batch, backward.backward);
  const auto backward_as_text = action_as_text();
  for (auto* under : {&forward_, &backward_}) under->pass.holds.assign(units_.size(), false);
  grad::PairAccumulators accumulators;
  const Meanwhile<grad::PairAccumulators*> of_units(accumulators_, &accumulators);
  const Meanwhile<const Pass*> other_of_forward(forward_.pass.paired, &backward_.pass);
  const Meanwhile<const Pass*> other_of_backward(backward_.pass.paired, &forward_.pass);
  const Meanwhile inside(inside_pair_, true);
  const LeavesLabels at_the_end(runtime_);
  // The backward begins, so that the forward's attention overlaps with the exchange that returns
  // the experts' results. Otherwise only the order of rows would be computed during that exchange.
  const auto turns = runtime_.turns().run(
      [&] { call_of_pair(backward.stage, backward.micro_batch, backward.run); },
      [&] { call_of_pair(forward.stage, forward.micro_batch, forward.run); },
      {.first = concat("backward ", backward.micro_batch, " of stage ", backward.stage),
       .second = concat("forward ", forward.micro_batch, " of stage ", forward.stage),
       .at_turn = [&] { accumulators.exchange(); }});
  const auto& expected = turns_.stages;
  require_turns(forward_as_text, turns.second,
                *expected[static_cast<std::size_t>(forward.stage)].forward);
  require_turns(backward_as_text, turns.first,
                *expected[static_cast<std::size_t>(backward.stage)].backward);
}

/// Records how many turns a pass has taken, in a step that records.
void OpenStep::count_turns(const UnderWay& under, std::optional<std::int64_t>& recorded,
                           bool is_first) {
  const auto turns = comm::Turns::passed() - under.turns_before;
  if (is_first) {
    recorded = turns;
  } else if (recorded != turns) {
    recorded.reset();
  }
}

void OpenStep::require_turns(const std::string& of, std::int64_t found, std::int64_t expected) {
  if (found == expected) return;
  leave_record_in(of, concat(found, " turns"), concat(expected),
                  "exchanges in every step of it, or run no pairs under each other "
                  "(pipeline.overlap = \"off\", PipelineOptions::overlap = false)");
}

}  // namespace tessera::fsdp
