// The agreements between the ranks of a stage: when a step begins, before it follows a plan, and
// when it ends.
#include <exception>
#include <sstream>
#include <utility>
#include <vector>

#include "base/interrupt.h"
#include "comm/group.h"
#include "fsdp/agreed/step_plan_check.h"
#include "fsdp/runtime/open_step.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// "rank 0 has X, rank 2 has Y" for the first lines that differ; empty where none do. Collective.
std::string difference(comm::Group& group, const std::string& lines, const char* what) {
  const auto found = comm::first_that_differs(group, lines, what);
  if (!found) return "";
  std::istringstream first(found->of_first), other(found->of_rank);
  std::string one, two;
  do {
    if (!std::getline(first, one)) one = "nothing more";
    if (!std::getline(other, two)) two = "nothing more";
  } while (one == two && one != "nothing more");
  return concat("rank 0 has ", one, ", rank ", found->rank, " has ", two);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

}  // namespace

void OpenStep::agree_at_begin() {
  known_ = runtime_.planning().known.follow({options_.schedule, options_.stages});
  if (auto* group = runtime_.data_group(); group != nullptr) {
    const auto& controls = runtime_.controls_as_text();
    std::string pending;
    for (const auto* unit : runtime_.units()) {
      if (unit->progress().pending) pending += concat(" ", unit->shown_name());
    }
    const auto text = concat(
        "the model ", runtime_.model_name(), "\nthe schedule ", options_.schedule, "\n",
        options_.stages, " stages\n",
        options_.micro_batches ? concat(*options_.micro_batches, " micro-batches\n")
                               : std::string(),
        runtime_.planning().planner ? concat("planner ", runtime_.planning().planners)
                                    : std::string("no planner"),
        "\n", options_.reshard == StepReshard::kStep ? "kStep" : "kMicroBatch", "\n",
        options_.sync_every_micro_batch ? "" : "no ", "sync_every_micro_batch\nthe controls ",
        controls.empty() ? "none" : controls, "\nunsharded units:\n", runtime_.memory_lines(),
        "gradients that are to be reduced in", pending);
    const auto same = comm::all_agree(
        *group,
        {hash_bytes(text), known_ ? known_->record.hash() : 0, known_ ? known_->turns.hash() : 0},
        "step scope");
    TESSERA_CHECK(same[0], ErrorKind::kUsage,
                  "StepScope differs between ranks: ", difference(*group, text, "step scopes"),
                  "; open it on every rank with the same options, at the same place");
    if (!same[1]) known_ = nullptr;
    ranks_turn_alike_ = same[2];
  }
  records_ = known_ == nullptr;
  if (!records_) {
    record_ = known_->record;
    turns_ = known_->turns;
  }
  record_.stages.resize(stages_.size());
  turns_.stages.resize(stages_.size());
}

/// Calls the model's planner. Errors: those of the planner; kUsage for a plan with faults, or of
/// another step.
StepPlan OpenStep::planned(const PlanInputs& inputs) const {
  auto plan = runtime_.planning().planner(record_, inputs.units, inputs.choices, inputs.order);
  const auto faults = faults_of(plan);
  TESSERA_CHECK(faults.empty(), ErrorKind::kUsage, "plan of a step: found ", faults.front(),
                ", expected one that holds; make it from what it is planned for");
  TESSERA_CHECK(
      plan.record == record_ && plan.order == inputs.order && plan.units == inputs.units,
      ErrorKind::kUsage,
      "plan of a step: found one of another trace, other units or another order, expected one of "
      "this step; make it again");
  return plan;
}

/// Compares the plans of all ranks. Where any rank's planner refused, returns that refusal on all
/// ranks. Collective.
std::exception_ptr OpenStep::agree_on(const StepPlan& plan, std::exception_ptr refusal) const {
  auto* group = runtime_.data_group();
  const auto hash = refusal ? hash_bytes(message_of(refusal)) : plan.hash();
  try {
    if (group == nullptr || comm::all_agree(*group, {hash}, "plan of a step")[0]) return refusal;
  } catch (const comm::LostRank&) {
    // A rank with the same refusal may throw, and leave, before this one has all answers.
    if (refusal) return refusal;
    throw;
  }
  refusal =
      comm::shared_refusal(*group, runtime_.world().rank(), refusal, "refused plans of a step");
  if (refusal) return refusal;
  return std::make_exception_ptr(
      Error(ErrorKind::kUsage, concat("plans of a step differ between ranks: ",
                                      difference(*group, to_string(plan), "plans of a step"),
                                      "; give every rank the same one")));
}

/// Makes the plan, or takes that of the last step. Its inputs are agreed on, so all ranks have the
/// same plan. Returns why there is none, the same on all ranks. Collective.
std::exception_ptr OpenStep::make_plan() {
  const auto order = options_.micro_batches ? PlanOrder::kOneAfterTheOther : PlanOrder::kAny;
  std::vector<bool> resharded;
  for (const auto* unit : runtime_.units()) resharded.push_back(!stays(*unit));
  PlanInputs inputs{runtime_.plan_units(), eager_choices(record_, resharded, reduce_at(), order),
                    order};
  inputs.choices.recompute = runtime_.own_recompute();
  auto& known = *known_;
  if (known.plan != nullptr && known.inputs == inputs) {
    step_plan_ = runtime_.planning().followed = known.plan;
    return nullptr;
  }
  // A second begin_step() forgets the last step's requests: those of another plan do not come
  // again. The pool hands out the most recently used blocks first, so blocks that only the other
  // plan needed stay idle.
  runtime_.pool()->begin_step();
  StepPlan plan;
  std::string marks;
  if (runtime_.planning().planner) {
    std::exception_ptr refusal;
    try {
      plan = planned(inputs);
    } catch (const std::exception&) {
      if (base::handles_interrupt()) throw;
      refusal = std::current_exception();
    }
    if (refusal = agree_on(plan, refusal); refusal) return refusal;
    marks = concat(", plan ", plan.hash());
    first_of_plan_ = runtime_.pool()->requests();
  } else {
    plan = fsdp::make_plan(record_, inputs.units, inputs.choices, order);
  }
  known.marks = std::move(marks);
  known.inputs = std::move(inputs);
  known.plan = std::make_shared<const StepPlan>(std::move(plan));
  step_plan_ = runtime_.planning().followed = known.plan;
  return nullptr;
}

std::string OpenStep::log_as_text() const {
  std::string text;
  const auto word = [](const Action& action) -> std::string {
    switch (action.kind) {
      case Kind::kNone:
        return "nothing";
      case Kind::kForward:
        return "begin_forward";
      case Kind::kBackward:
        return action.backward == Backward::kFull ? "begin_backward (kFull)"
                                                  : "begin_backward (kInputOnly)";
      case Kind::kWeights:
        return "run_weight_gradients";
      case Kind::kReshard:
        return "reshard";
      case Kind::kReduce:
        return "reduce";
    }
    return "";
  };
  for (const auto& action : log_) {
    const bool of_stage = action.kind == Kind::kReshard || action.kind == Kind::kReduce;
    text += concat(word(action), " of ",
                   of_stage ? named(action.stage) : named(action.stage, action.micro_batch), "\n");
  }
  return text;
}

std::string OpenStep::record_as_text() const {
  std::string text;
  for (std::size_t stage = 0; stage < record_.stages.size(); ++stage) {
    for (const auto& part : record_.stages[stage].parts) {
      for (std::size_t i = 0; i < part.units.size(); ++i) {
        text +=
            concat("unit ", runtime_.units().at(part.units[i])->shown_name(),
                   part.checkpoints[i] != 0 ? " in a checkpoint" : "", " in stage ", stage, "\n");
      }
      for (const auto position : part.exits) {
        text += concat("the end of ", runtime_.units().at(part.units.at(position))->shown_name(),
                       " in stage ", stage, "\n");
      }
      text += concat("no other unit in stage ", stage, "\n");
    }
  }
  return text;
}

/// Checks at the end of a step, with one exchange, that all ranks have made the same calls, which
/// the calls themselves do not check. Returns, on all ranks, the refusal of any rank, or null.
/// `mine`: that of this rank.
std::exception_ptr OpenStep::agree_at_end(const std::exception_ptr& mine) {
  auto* group = runtime_.data_group();
  if (group == nullptr) return mine;
  Hasher log;
  for (const auto& one : log_) {
    log.add(static_cast<std::uint64_t>(one.kind)).add(std::int64_t{one.stage});
    log.add(one.micro_batch).add(static_cast<std::uint64_t>(one.backward));
  }
  if (mine) log.add(hash_bytes(message_of(mine)));
  std::vector<bool> same;
  try {
    same = comm::all_agree(*group, {log.digest(), records_ ? record_.hash() : 0}, "end of a step");
  } catch (const comm::LostRank&) {
    if (mine) return mine;  // a rank with the same error has aborted the World
    throw;
  }
  if (same[0] && mine) return mine;  // the same on all ranks
  if (!same[0]) {
    const auto found =
        comm::shared_refusal(*group, runtime_.world().rank(), mine, "refused ends of a step");
    if (found) return found;
  }
  TESSERA_CHECK(same[0], ErrorKind::kComm,
                calls_differ("StepScope::finish: ranks have run different things: ",
                             difference(*group, log_as_text(), "calls of a step scope")));
  TESSERA_CHECK(same[1], ErrorKind::kComm,
                units_differ(difference(*group, record_as_text(), "units of stages")));
  return nullptr;
}

}  // namespace tessera::fsdp
