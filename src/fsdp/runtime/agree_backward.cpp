// What a backward issues: the part of Runtime that agrees with the other ranks on one list.
// [Note: collective order]
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "base/hash.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using torch::autograd::Node;

/// Whether the current graph task will run `node`, or runs it.
bool is_in_this_backward(const Node* node) {
  if (node == nullptr) return false;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  auto* const key = const_cast<Node*>(node);
  if (nodes == nullptr || nodes->count(key) == 0) return false;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(key);
  return found != chosen->end() && found->second.should_execute();
}

bool any_in_this_backward(const LivingNodes& nodes) { return nodes.any(is_in_this_backward); }

std::uint64_t hash_of(const std::vector<bool>& bits) {
  std::string text;
  for (const bool bit : bits) text += bit ? '1' : '0';
  return hash_bytes(text);
}

bool needs_weights(const Entry& entry, const Entry* first) {
  // The root of a graph is not among its nodes.
  if (first == &entry) return true;
  const Node* checkpoint = entry.checkpoint;
  if (first != nullptr && checkpoint != nullptr && checkpoint == first->checkpoint) return true;
  return any_in_this_backward(entry.at_results) || is_in_this_backward(checkpoint);
}

}  // namespace

/// Errors: kUsage for parameters that were changed since a forward that this rank's backward goes
/// through.
BackwardView Runtime::view_of_backward(const Entry* first) const {
  BackwardView view;
  if (!under_way_.empty()) view.steps_done = under_way_.back().done;
  for (const auto& past : forwards_.past()) {
    const auto segment = past.segment.lock();
    if (segment == nullptr) continue;
    view.alive.insert(past.forward->number);
    std::vector<bool> reached(past.forward->trace.units.size());
    bool any = false;
    for (const auto& weak : segment->entries) {
      const auto entry = weak.lock();
      if (entry == nullptr) continue;
      const bool needs = needs_weights(*entry, first);
      any = any || needs || any_in_this_backward(entry->at_arguments);
      if (needs) reached.at(entry->position) = true;
    }
    if (!any) continue;
    TESSERA_CHECK(segment->weights == segment->weights_now(), ErrorKind::kUsage,
                  "backward: found parameters that were changed since this forward, expected those "
                  "that it computed with; run every backward of a forward before the optimizer "
                  "steps");
    view.reached.emplace(past.forward->number, std::move(reached));
  }
  return view;
}

UnitState Runtime::state_of(const Unit& unit) const {
  UnitState state;
  state.gathers =
      unit.controls.unshard_in_backward && !unit.always_unsharded() && !unit.buckets().empty();
  state.gathered = unit.gathered() || unit.gather_pending();
  // A backward inside another one leaves to that one what it has gathered.
  state.releases = under_way_.empty() && unit.controls.reshard_after_forward &&
                   unit.controls.reshard_after_backward && unit.progress_.open_calls == 0;
  state.reduces = unit.trainable() && sink_.store() == nullptr;
  for (const auto& outer : under_way_) {
    const auto begin = outer.plan.steps.begin() + static_cast<std::ptrdiff_t>(outer.done);
    state.reduces =
        state.reduces && std::none_of(begin, outer.plan.steps.end(), [&](const Step& step) {
          return step.kind == Step::Kind::kReduce && step.unit == unit.id();
        });
  }
  for (const auto& lender : unit.lenders) state.lenders.push_back(lender->id());
  for (const auto& next : living(unit.backward_prefetch, "set_backward_prefetch", unit)) {
    state.prefetch.push_back(next->id());
  }
  return state;
}

/// What is unsharded, in words, as it enters the agreement.
std::string Runtime::memory_lines() const {
  std::string text;
  for (const auto* unit : units_) {
    if (unit->always_unsharded() || !(unit->gathered() || unit->gather_pending())) continue;
    text += concat(unit->shown_name(), "\n");
  }
  return text;
}

/// The same on every rank whose hash_of_agreed() is.
ViewFrame Runtime::frame_of_views() const {
  ViewFrame frame;
  if (!under_way_.empty()) frame.steps = under_way_.back().plan.steps.size();
  for (const auto& past : forwards_.past()) {
    frame.forwards.emplace(past.forward->number, past.forward->trace.units.size());
  }
  return frame;
}

std::uint64_t Runtime::hash_of_agreed() const {
  Hasher hash;
  hash.add(std::string_view(model_)).add(std::uint64_t{forwards_.count()});
  hash.add(static_cast<std::uint64_t>(under_way_.size())).add(frame_of_views().steps);
  for (const auto& past : forwards_.past()) {
    hash.add(std::uint64_t{past.forward->number}).add(past.forward->trace.hash());
  }
  if (step_ != nullptr) hash.add(std::string_view(step_->action_in_words()));
  return hash.add(std::string_view(memory_lines())).add(std::string_view(controls_)).digest();
}

std::string calls_differ(const std::string& what, const std::string& difference) {
  return concat(what, difference, "; walk through one list on every rank of a stage");
}

std::string units_differ(const std::string& difference) {
  return concat("the order of units differs between ranks: ", difference,
                "; run the same units in the same order on every rank");
}

/// All ranks are here, since their hashes differ. Errors: kComm, kUsage.
void Runtime::name_difference() {
  const auto models = difference_between_ranks(model_, "models of a backward");
  TESSERA_CHECK(models.empty(), ErrorKind::kUsage, "backwards of different models meet: ", models,
                " (numbered as they were sharded); on every rank run the backwards of the same "
                "models in the same order, each through some result of its model");
  agree_on_controls();
  const auto action = difference_between_ranks(
      step_ != nullptr ? step_->action_in_words() : "a backward outside of a step",
      "backwards of a step");
  TESSERA_CHECK(action.empty(), ErrorKind::kComm,
                calls_differ("backwards of a step differ between ranks: ", action));
  std::string text;
  for (const auto& past : forwards_.past()) {
    const auto& trace = past.forward->trace;
    for (std::size_t i = 0; i < trace.units.size(); ++i) {
      const bool again = trace.checkpoints[i] != 0;
      text +=
          concat(units_.at(trace.units[i])->shown_name(), again ? " in a checkpoint" : "", "\n");
    }
    for (const auto position : trace.exits) {
      text += concat("the end of ", units_.at(trace.units.at(position))->shown_name(), "\n");
    }
    text += concat("no other unit in forward ", past.forward->number, "\n");
  }
  text += concat("no other forward of ", forwards_.count(), "\n");
  const auto order = difference_between_ranks(text, "forward order names");
  TESSERA_CHECK(order.empty(), ErrorKind::kComm, units_differ(order));
  const auto memory = difference_between_ranks(memory_lines(), "units in memory");
  throw Error(ErrorKind::kComm,
              concat("units that are unsharded differ between ranks: ", memory,
                     "; call unshard() and reshard() on every rank at the same place, and run "
                     "backwards inside backwards on all of them"));
}

BackwardView Runtime::agree_on_backward(const BackwardView& mine) {
  if (data_group() == nullptr) return mine;
  controls_in_words();
  const auto frame = frame_of_views();
  const auto bits = to_bits(mine, frame);
  const auto same =
      comm::all_agree(*data_group(), {hash_of_agreed(), hash_of(bits)}, "forward order");
  if (!same[0]) name_difference();
  if (same[1]) return mine;
  return from_bits(comm::any_of_ranks(*data_group(), bits, "use of results"), frame);
}

/// A program that differentiates nothing of what it runs with grad mode on never comes to a
/// backward, where forwards are forgotten.
void Runtime::keep_forward() {
  if (forwards_.should_forget()) {
    forwards_.forget_all_but(agree_on_backward(view_of_backward(nullptr)).alive);
    forwards_.forgot_what_it_could();
  }
  forwards_.keep_current();
}

void Runtime::plan_backward_under_way(const Entry* first) {
  const auto agreed = agree_on_backward(view_of_backward(first));
  forwards_.forget_all_but(agreed.alive);
  if (!under_way_.empty()) do_steps(under_way_.back(), agreed.steps_done);
  BackwardUnderWay next;
  next.reached = agreed.reached;
  std::vector<ReachedForward> forwards;
  const auto& kept = forwards_.past();
  for (auto past = kept.rbegin(); past != kept.rend(); ++past) {
    const auto reached = agreed.reached.find(past->forward->number);
    if (reached == agreed.reached.end()) continue;
    forwards.push_back({past->forward->number, &past->forward->trace, reached->second});
    if (auto segment = past->segment.lock()) next.segments.push_back(std::move(segment));
    forwards_.follow(past->forward->trace);
  }
  TESSERA_INVARIANT(forwards.size() == agreed.reached.size(),
                    "a backward goes through a forward that is forgotten");
  std::vector<UnitState> states;
  for (const auto* unit : units_) states.push_back(state_of(*unit));
  next.plan = plan_backward(forwards, std::move(states));
  for (const auto& segment : next.segments) {
    for (const auto& weak : segment->entries) {
      if (const auto entry = weak.lock()) expect(*entry);
    }
  }
  if (sink_.store() != nullptr) {
    // Deferred gradients: all of it waits until no rank owes any.
    for (const auto& forward : forwards) {
      for (const auto id : forward.trace->units) {
        const auto owe = [](Unit& unit) {
          unit.progress_.owed = unit.progress_.owed || unit.trainable();
        };
        owe(*units_.at(id));
        for (const auto& lender : units_[id]->lenders) owe(*lender);
      }
    }
  }
  under_way_.push_back(std::move(next));
}

}  // namespace tessera::fsdp
