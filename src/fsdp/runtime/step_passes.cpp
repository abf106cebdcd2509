// Forwards and backwards inside a step scope: they follow the record, or make it.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/pass_local.h"
#include "base/threads/backward_pass.h"
#include "fsdp/agreed/pass_planner.h"
#include "fsdp/runtime/open_step.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/pair_accumulators.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Whether this is torch::autograd::grad, or a backward() with inputs. These form and defer only
/// the gradients of the chosen tensors.
bool is_towards_chosen_tensors() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && !chosen->empty();
}

}  // namespace

/// Throws the message on this rank, and aborts the World with it as the reason.
void OpenStep::fail(ErrorKind kind, const std::string& message) {
  runtime_.fail(message);
  throw Error(kind, message);
}

void OpenStep::leave_record(const std::string& found, const std::string& expected) {
  leave_record_in(action_as_text(), found, expected,
                  "units in every step of it, or open the StepScope with another schedule");
}

void OpenStep::leave_record_in(const std::string& action, const std::string& found,
                               const std::string& expected, const char* what_mends) {
  fail(ErrorKind::kComm, concat("rank ", runtime_.world().rank(), ", ", action, ": found ", found,
                                ", expected ", expected, " as in the first step of the schedule '",
                                options_.schedule, "'; run the same ", what_mends));
}

std::string OpenStep::name_of(const std::vector<Trace>& parts, std::size_t part,
                              std::size_t position) const {
  if (part >= parts.size()) return "no other forward";
  if (position >= parts[part].units.size()) return "no other unit";
  return concat("unit ", runtime_.units().at(parts[part].units[position])->shown_name(),
                parts[part].checkpoints[position] != 0 ? " in a checkpoint" : "");
}

std::string OpenStep::action_as_text() const {
  const auto& action = now_->action;
  const auto* what = action.kind == Kind::kForward    ? "the forward"
                     : action.kind == Kind::kBackward ? "the backward"
                                                      : "nothing announced";
  const bool defers = action.kind == Kind::kBackward && action.backward == Backward::kInputOnly;
  return concat(what, defers ? " (kInputOnly)" : "", " of stage ", action.stage, ", micro-batch ",
                action.micro_batch);
}

/// Whether the unit stays unsharded between single forwards and backwards.
bool OpenStep::stays(const Unit& unit) const {
  return options_.reshard == StepReshard::kStep || !unit.controls.reshard_after_forward;
}

void OpenStep::release_transient() {
  if (options_.reshard == StepReshard::kStep) return;
  for (auto* unit : runtime_.units()) {
    if (!stays(*unit) && unit->progress().open_calls == 0) unit->release();
  }
}

// ---------------------------------------------------------------------------------------- forward

/// Refuses a forward inside a backward. In a pair this includes a forward that the backward's
/// function calls before or after autograd runs.
void OpenStep::require_outside_of_backward() {
  const bool is_inside =
      is_pair() ? base::pass_here() == 0 || base::in_backward_pass() : runtime_.is_in_backward();
  if (!is_inside) return;
  now_ = &backward_;
  fail(ErrorKind::kUsage, !is_pair() && !base::in_backward_pass()
                              ? std::string(kAbandoned)
                              : concat(action_as_text(),
                                       " of a step: found a forward inside it, expected them one "
                                       "after the other"));
}

void OpenStep::begin_outermost() {
  require_outside_of_backward();
  runtime_.require_recovered();
  now_ = &forward_;
  auto& action = forward_.action;
  if (action.kind != Kind::kForward) {
    fail(ErrorKind::kUsage,
         "forward in a step: found one that was not announced, expected StepScope::begin_forward() "
         "before it");
  }
  auto& forwards = runtime_.forwards();
  if (action.parts == 0) action.before = forwards.checkpoints();
  forwards.begin(held_, weights_);
  forwards.current()->forward->in_step =
      InStep{number_, action.stage, action.micro_batch, action.parts};
}

void OpenStep::enter(const Unit& unit, std::size_t position, std::uint32_t checkpoint) {
  if (is_pair()) {
    require_outside_of_backward();
    std::vector<std::shared_ptr<grad::Leaf>> leaves(unit.owned_elsewhere.begin(),
                                                    unit.owned_elsewhere.end());
    for (const auto& parameter : unit.parameters()) {
      leaves.insert(leaves.end(), parameter->leaves.begin(), parameter->leaves.end());
    }
    accumulators_->enter(leaves);
  }
  now_ = &forward_;
  if (records_) return;
  const auto& parts = record_.stages[static_cast<std::size_t>(forward_.action.stage)].parts;
  const auto counted = checkpoint == 0 ? 0 : checkpoint - forward_.action.before;
  if (forward_.action.parts < parts.size()) {
    const auto& part = parts[forward_.action.parts];
    if (position < part.units.size() && part.units[position] == unit.id() &&
        part.checkpoints[position] == counted) {
      return;
    }
  }
  leave_record(concat("unit ", unit.shown_name(), counted != 0 ? " in a checkpoint" : ""),
               name_of(parts, forward_.action.parts, position));
}

void OpenStep::gather_for(Unit& unit, std::size_t position) {
  now_ = &forward_;
  auto& pass = forward_.pass;
  runtime_.begin_place(pass, pass.place(forward_.action.parts, position), unit);
}

OpenStep::MicroBatch& OpenStep::micro_batch_of(const UnderWay& under) {
  return stages_[static_cast<std::size_t>(under.action.stage)].micro_batches.at(
      under.action.micro_batch);
}

void OpenStep::leave(Unit& unit, bool is_outermost) {
  now_ = &forward_;
  if (is_pair()) accumulators_->leave();
  const auto& segment = runtime_.forwards().current();
  const auto& trace = segment->forward->trace;
  auto& one = micro_batch_of(forward_);
  if (records_) {
    if (unit.progress().open_calls == 0 && !stays(unit)) unit.release();
    if (!is_outermost) return;
    one.parts.push_back(counted_after(trace, forward_.action.before));
    release_transient();
  } else {
    const auto& parts = record_.stages[static_cast<std::size_t>(forward_.action.stage)].parts;
    const auto& part = parts.at(forward_.action.parts);
    if (is_outermost && trace.units.size() < part.units.size()) {
      leave_record("no other unit", name_of(parts, forward_.action.parts, trace.units.size()));
    }
    if (trace.exits.back() != part.exits.at(trace.exits.size() - 1)) {
      leave_record("units that end in another order", "them one inside another");
    }
    runtime_.advance(forward_.pass,
                     forward_.pass.place(forward_.action.parts, trace.exits.back()).after);
    if (!is_outermost) return;
  }
  one.segments.push_back(segment);
  ++forward_.action.parts;
}

// --------------------------------------------------------------------------------------- backward

/// Requires that the entry belongs to the backward of begin_backward(). Errors: kUsage, here and on
/// the other ranks.
void OpenStep::require_of_action(const Entry& entry) {
  now_ = &backward_;
  const auto& of = entry.segment->forward->in_step;
  if (backward_.action.kind != Kind::kBackward) {
    fail(ErrorKind::kUsage, concat("backward of unit ", entry.unit->shown_name(),
                                   " in a step: found one that was not announced, expected "
                                   "StepScope::begin_backward() before it"));
  }
  if (of && of->step == number_ && of->stage == backward_.action.stage &&
      of->micro_batch == backward_.action.micro_batch) {
    return;
  }
  fail(
      ErrorKind::kUsage,
      concat(action_as_text(), ": found unit ", entry.unit->shown_name(),
             of && of->step == number_
                 ? concat(" of stage ", of->stage, ", micro-batch ", of->micro_batch)
                 : std::string(" of a forward outside of the step"),
             " in it, expected those of its own forward; detach what crosses from one stage to the "
             "next"));
}

/// Returns what any rank's backward goes through, by part and position. Collective.
std::vector<Reach> OpenStep::agreed_reach(const Entry* first) {
  const auto agreed = runtime_.agree_on_backward(first);
  const auto& one = micro_batch_of(backward_);
  std::vector<Reach> reached;
  for (const auto& part : one.parts) reached.emplace_back(part.units.size(), false);
  for (const auto& past : runtime_.forwards().past()) {
    const auto found = agreed.reached.find(past.forward->number);
    if (found == agreed.reached.end()) continue;
    const auto& of = past.forward->in_step;
    if (!of || of->step != number_ || of->stage != backward_.action.stage ||
        of->micro_batch != backward_.action.micro_batch) {
      fail(ErrorKind::kUsage,
           concat(action_as_text(), ": found that it goes through another forward",
                  of ? concat(" (stage ", of->stage, ", micro-batch ", of->micro_batch, ")")
                     : std::string(),
                  ", expected its own alone; detach what crosses from one stage to the next"));
    }
    reached.at(of->part) = found->second;
  }
  return reached;
}

/// Plans the backward under way, in a step that records.
std::shared_ptr<const PassPlan> OpenStep::plan_recorded() {
  // Reduces where an eager plan of the same options does, so that sums have the same order from the
  // first step on.
  const bool reduces_here = reduces(reduce_at(), micro_batch_of(backward_).which);
  std::vector<PlanUnit> units;
  std::vector<bool> releases;
  for (const auto* unit : runtime_.units()) {
    auto& of = units.emplace_back(runtime_.plan_unit(*unit));
    of.gathered = of.gathers && stays(*unit);  // those that stay were gathered by the forward
    of.reduces = of.reduces && reduces_here;
    releases.push_back(!stays(*unit));
  }
  return std::make_shared<const PassPlan>(
      fsdp::plan_backward(recorded_, std::move(units), releases));
}

/// Begins a pass that follows the step's plan, and keeps the plan alive.
void OpenStep::follow(UnderWay& under, PassPlan MicroBatchPlan::* which) {
  const auto& stage = step_plan_->stages[static_cast<std::size_t>(under.action.stage)];
  const auto& plan = stage.of(micro_batch_of(under).which).*which;
  under.pass.plan = std::shared_ptr<const PassPlan>(step_plan_, &plan);
  under.pass.number = under.micro_batch();
}

void OpenStep::plan_backward(const Entry* first) {
  now_ = &backward_;
  if (first != nullptr) require_of_action(*first);
  if (backward_.action.kind != Kind::kBackward || backward_.action.began) {
    fail(ErrorKind::kUsage, concat(action_as_text(),
                                   ": found another backward, expected one after each "
                                   "StepScope::begin_backward()"));
  }
  if (is_towards_chosen_tensors()) {
    fail(ErrorKind::kUsage,
         concat(action_as_text(),
                ": found torch::autograd::grad, or a backward() with inputs, expected a backward() "
                "without, since weight gradients would silently be left out; call backward() "
                "and read the input's grad()"));
  }
  backward_.action.began = true;
  auto& record = record_.stages[static_cast<std::size_t>(backward_.action.stage)];
  if (records_) {
    recorded_ = {micro_batch_of(backward_).parts, agreed_reach(first)};
    backward_.pass.plan = plan_recorded();
    backward_.pass.number = backward_.micro_batch();
    if (recorded_.parts == record.parts) add_reach(record.reached, recorded_.reached);
  } else {
    if (record.reached.empty()) leave_record("one", "none");
    follow(backward_, &MicroBatchPlan::backward);
  }
  const grad::WeightGradGroup group{backward_.action.stage, backward_.action.micro_batch};
  runtime_.under_exchange().begin(group);
  if (backward_.action.backward == Backward::kInputOnly) {
    runtime_.store().begin(group);
    runtime_.sink().set_store(&runtime_.store());
  }
}

void OpenStep::pre_backward(Entry& entry) {
  require_of_action(entry);
  const auto part = entry.segment->forward->in_step->part;
  const auto& record =
      records_ ? recorded_ : record_.stages[static_cast<std::size_t>(backward_.action.stage)];
  if (!record.reached.at(part).at(entry.position)) {
    leave_record(concat("unit ", entry.unit->shown_name(), " in it"), "one without it");
  }
  runtime_.begin_place(backward_.pass, backward_.pass.place(part, entry.position), *entry.unit);
}

void OpenStep::post_backward(Entry& entry) {
  require_of_action(entry);
  const auto part = entry.segment->forward->in_step->part;
  runtime_.advance(backward_.pass, backward_.pass.place(part, entry.position).after);
}

std::vector<std::shared_ptr<Segment>> OpenStep::segments_under_way() const {
  std::vector<std::shared_ptr<Segment>> segments;
  if (backward_.action.kind != Kind::kBackward) return segments;
  const auto& stage = stages_[static_cast<std::size_t>(backward_.action.stage)];
  for (const auto& weak : stage.micro_batches.at(backward_.action.micro_batch).segments) {
    if (auto segment = weak.lock()) segments.push_back(std::move(segment));
  }
  return segments;
}

void OpenStep::end_backward() {
  now_ = &backward_;
  runtime_.advance(backward_.pass, backward_.pass.plan->actions.size());
  auto& of = stages_[static_cast<std::size_t>(backward_.action.stage)];
  auto& one = micro_batch_of(backward_);
  for (const auto& weak : std::exchange(one.segments, {})) {
    const auto segment = weak.lock();
    if (segment == nullptr) continue;
    for (const auto& each : segment->entries) {
      if (const auto entry = each.lock()) entry->pending.reset();
    }
  }
  one.parts.clear();
  runtime_.leave_backward();
  runtime_.sink().set_store(nullptr);
  if (records_) release_transient();
  const bool is_first = !std::exchange(of.had_backward, true);
  one.state = backward_.action.backward == Backward::kFull ? State::kDone : State::kInputDone;
  mark_dirty(backward_.action.stage);
  if (records_) {
    auto& turns = turns_.stages[static_cast<std::size_t>(backward_.action.stage)];
    count_turns(backward_, turns.backward, is_first);
  }
  reset(backward_);
}

}  // namespace tessera::fsdp
