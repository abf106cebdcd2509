// The backward half of Runtime: the list that all ranks agree on when a backward begins ([Note:
// collective order]), the gathers and reductions that it issues, and the end of the outermost graph
// task.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/doing.h"
#include "base/hash.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/threads/backward_pass.h"
#include "comm/device.h"
#include "fsdp/agreed/pass_planner.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Ends a backward. The graph task's callback owns this object and calls run(). When an exception
/// ends the backward, the object is destroyed without run().
class BackwardEnd {
 public:
  explicit BackwardEnd(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)),
        generation_(runtime_->generation()),
        epoch_(runtime_->world().recoveries()) {}
  ~BackwardEnd() {
    const base::NoInterrupts until_the_others_know;
    try {
      if (runtime_) runtime_->abandon_backward(generation_, epoch_);
    } catch (const std::exception&) {
      // The abort failed too; the exception under way tells the reason.
    }
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  void run() { std::exchange(runtime_, nullptr)->end_backward(); }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::uint64_t generation_;
  std::uint64_t epoch_;
};

/// torch::autograd::grad on a leaf takes the gradient before the leaf's hooks see it, so that it
/// would silently never be reduced.
void refuse_capture(const Unit& unit) {
  const auto* targets = torch::autograd::get_current_graph_task_exec_info();
  if (targets == nullptr || targets->empty()) return;  // an ordinary backward
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) {
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf->tensor);
      const auto target = targets->find(accumulator.get());
      TESSERA_CHECK(target == targets->end() || target->second.captures_ == nullptr,
                    ErrorKind::kUsage, "gradient of ", parameter->contract.name,
                    ": found torch::autograd::grad on the unsharded parameter, which no reduction "
                    "sees, expected backward(); read the gradient from the handle's parameters");
    }
  }
}

/// Gradients are summed over ranks outside of any graph. So a graph of the backward (create_graph)
/// would end at a unit, or read the unit's parameters when they are sharded. Autograd leaves grad
/// mode on to make such a graph.
void refuse_create_graph(const Unit& unit) {
  TESSERA_CHECK(!at::GradMode::is_enabled(), ErrorKind::kUsage, "backward of unit ",
                unit.shown_name(),
                ": found create_graph, expected a backward without it, since gradients of sharded "
                "parameters have no graph; take second derivatives of a plain module");
}

/// Hooks on a thread of autograd would run with other streams and thread-locals than the rank's,
/// and ranks that share a device would wait for each other for ever.
void refuse_threads(at::Device device) {
  TESSERA_CHECK(device.is_cpu() || comm::backward_stays_here(), ErrorKind::kUsage,
                "backward: found autograd's multithreading on, on ", device.str(),
                ", expected a backward on the thread that calls it; call World::attach_thread() on "
                "each thread of your own that runs a backward");
}

}  // namespace

void Runtime::begin_backward(const Entry* first) {
  take_up_abandoned();
  if (in_backward_) return;
  in_backward_ = true;
  views_differ_ = is_graph_unchecked_ = false;
  const auto step = step_;
  if (step == nullptr) {
    store_.begin_micro_batch();
    under_exchange_.begin(store_.group());
    begin_sums();
  }
  // Nested graph tasks (recomputation) begin after this one; the callback belongs to the outermost
  // one. Any exception from here on ends as a failure of all ranks.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::make_shared<BackwardEnd>(shared_from_this())] { end->run(); });
  refuse_create_graph(first != nullptr ? *first->unit : *units_.front());
  refuse_threads(device());
  TESSERA_CHECK(has_scaler_ || loss_scale() == 1.0, ErrorKind::kUsage,
                "backward: found gradients at the loss scale ", loss_scale(),
                " of a GradScaler that ended in the middle of a step, expected it to live on; keep "
                "it as long as the model trains, or recover the World");
  for (const auto* unit : units_) refuse_capture(*unit);
  if (step != nullptr) {
    step->plan_backward(first);
    return;
  }
  warn_of_no_scope();
  import_user_changes();
  plan_backward_under_way(first);
}

void Runtime::begin_sums() {
  for (auto* unit : units_) {
    // Reductions that the last backward did not wait for are published with the others.
    auto& progress = unit->progress_;
    progress.unpublished = progress.unpublished || (awaiting_tickets_ && progress.reduced);
    progress.reduced = false;
  }
  awaiting_tickets_ = holds_reductions_ = false;
}

/// Warns once, where compile() was called, that no plan is followed. Replayed regions need no plan.
void Runtime::warn_of_no_scope() {
  if (!planning_.planner || regions_ != nullptr || std::exchange(warned_of_no_scope_, true)) return;
  if (world().rank() != 0) return;
  log::warn(
      "compile: found a backward outside of a StepScope, which follows no plan; open a StepScope "
      "around each step (tessera/step_scope.h), or set CompileOptions::mode to kOff");
}

void Runtime::abandon_backward(std::uint64_t generation, std::uint64_t epoch) {
  if (generation != generation_ || !in_backward_) return;
  abandoned_ = generation;
  // The other ranks wait for this one, whose thread may never enter the runtime again: so this
  // aborts at once. abort_epoch() does nothing if all ranks have recovered since the check above.
  if (world().size() > 1) world().abort_epoch(epoch, kAbandoned + DoingHere::as_text());
}

/// Returns the innermost backward that goes through the entry and has not passed its place; null:
/// none. Finishes the backwards inside that one, which have ended. `needs_weights`: only a backward
/// that needs the unit's parameters counts.
BackwardUnderWay* Runtime::under_way(const Entry& entry, bool needs_weights) {
  for (auto i = under_way_.size(); i-- > 0;) {
    auto& backward = under_way_[i];
    const auto part = backward.part_of(entry);
    if (part == backward.forwards.size()) continue;
    if (backward.find({part, entry.position, false}) == backward.places.end()) continue;
    if (needs_weights && !backward.reached[part][entry.position]) continue;
    while (under_way_.size() > i + 1) {
      finish(under_way_.back());
      under_way_.pop_back();
    }
    return &backward;
  }
  return nullptr;
}

/// Runs the remaining actions of the backward. Its entries no longer wait for it.
void Runtime::finish(BackwardUnderWay& backward) {
  advance(backward.pass, backward.pass.plan->actions.size());
  for (const auto& segment : backward.segments) {
    for (const auto& weak : segment->entries) {
      if (const auto entry = weak.lock()) entry->pending.reset();
    }
  }
}

/// Throws here and on the other ranks, as every error of a backward does.
void Runtime::refuse_forgotten(const Entry& entry) {
  auto& now = entry.unit->runtime();
  const auto message = concat(
      "backward of unit ", entry.unit->shown_name(),
      ": found a forward of before the model had other units (a handle of it is gone, or "
      "fully_shard went around it), expected one that came after; run backwards before, or keep "
      "the outermost handle as long as its losses");
  now.fail(message);
  throw Error(ErrorKind::kUsage, message);
}

/// Refuses a forward of a step scope that has ended: the step's gradients were summed when it
/// ended.
void Runtime::refuse_other_step(const Entry& entry) {
  const auto& of = entry.segment->forward->in_step;
  if (!of || (step_ != nullptr && of->step == step_->number())) return;
  const auto message =
      concat("backward of unit ", entry.unit->shown_name(), ": found the forward of stage ",
             of->stage, ", micro-batch ", of->micro_batch,
             " of a StepScope that has ended, expected its backward before finish()");
  fail(message);
  throw Error(ErrorKind::kUsage, message);
}

void Runtime::pre_backward(Entry& entry) {
  take_up_abandoned();
  entered_ = entry.unit.get();
  entered_by_ = "backward";
  TESSERA_CHECK(entry.generation == generation_, ErrorKind::kUsage, "backward of unit ",
                entry.unit->shown_name(),
                ": found a forward of before a failure, expected one that came after it; run the "
                "step's forward again");
  if (entry.segment->forward->forgotten) refuse_forgotten(entry);
  refuse_other_step(entry);
  begin_backward(&entry);
  if (std::exchange(is_graph_unchecked_, false)) refuse_create_graph(*entry.unit);
  if (const auto step = step_) {
    step->pre_backward(entry);
    spans_.backward_begins(&entry, entry.unit->name());
    return;
  }
  auto* backward = under_way(entry, /*needs_weights=*/true);
  if (backward == nullptr) {
    // A node of this backward runs another backward, which autograd does not announce.
    plan_backward_under_way(&entry);
    backward = &under_way_.back();
  }
  const auto part = backward->part_of(entry);
  backward->note_passed({part, entry.position, true});
  begin_place(backward->pass, backward->pass.place(part, entry.position), *entry.unit);
  spans_.backward_begins(&entry, entry.unit->name());
}

void Runtime::post_backward(Entry& entry) {
  begin_backward();
  under_exchange_.form_all();  // for the next reduction: gradients that no exchange formed
  spans_.backward_ends(&entry);
  entry.pending.reset();
  if (const auto step = step_) {
    step->post_backward(entry);
    return;
  }
  auto* backward = under_way(entry, /*needs_weights=*/false);
  if (backward == nullptr) return;
  const auto part = backward->part_of(entry);
  backward->note_passed({part, entry.position, false});
  advance(backward->pass, backward->pass.place(part, entry.position).after);
}

void Runtime::expect(Entry& entry) {
  if (entry.pending || entry.generation != generation_) return;
  std::vector<PendingBackward::Count> owners;
  for (const auto& owner : entry.unit->owners) owners.push_back(owner->expected_);
  entry.pending.emplace(outstanding_, entry.unit->expected_, std::move(owners));
}

void Runtime::on_gradient() {
  // Outside of a backward the gradient is a deferred one, which may come at any time.
  if (base::in_backward_pass()) begin_backward();
}

void Runtime::on_tickets_closed() {
  if (step_ != nullptr || in_backward_ || !awaiting_tickets_ || sink_.store() != nullptr) return;
  if (sink_.open_tickets() > 0) return;
  try {
    settle_gradients();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

/// Collective.
bool Runtime::any_rank_has_tickets() {
  const bool mine = sink_.open_tickets() > 0;
  if (data_group() == nullptr) return mine;
  return comm::any_of_ranks(*data_group(), {mine}, "deferred gradients")[0];
}

void Runtime::end_backward() {
  try {
    under_exchange_.form_all();
    if (const auto step = step_) {
      step->end_backward();
      return leave_shards();
    }
    for (; !under_way_.empty(); under_way_.pop_back()) finish(under_way_.back());
    for (auto* unit : units_) {
      if (unit->progress_.open_calls == 0 && unit->controls.reshard_after_backward) unit->release();
    }
    leave_backward();
    awaiting_tickets_ =
        sink_.store() != nullptr ? any_rank_has_tickets() : sink_.open_tickets() > 0;
    if (!awaiting_tickets_) settle_gradients();
    leave_shards();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Runtime::leave_backward() {
  spans_.all_backwards_end();
  repeated_.forget();
  in_backward_ = false;
}

void Runtime::settle(const std::vector<bool>& dirty) {
  for (std::size_t i = 0; i < units_.size(); ++i) {
    auto& progress = units_[i]->progress_;
    progress.pending = progress.pending || (dirty.at(i) && units_[i]->trainable());
  }
  settle_gradients();
}

void Runtime::settle_gradients() {
  const at::NoGradGuard no_grad;
  awaiting_tickets_ = holds_reductions_ = false;
  // Reduces units that waited for deferred gradients, or that backwards without sync left.
  for (auto* unit : units_) {
    if (unit->progress_.pending) reduce(*unit, switches_.is_last_backward);
  }
  for (auto* unit : units_) {
    auto& progress = unit->progress_;
    progress.unpublished = progress.unpublished || progress.reduced;
    for (const auto& bucket : unit->buckets()) {
      TESSERA_CHECK(
          progress.pending || !bucket->trainable() || !bucket->has_arrivals(), ErrorKind::kContract,
          "unit ", unit->shown_name(),
          ": found gradients that arrived after its reduction, or without it, expected all of a "
          "backward before; run backwards one after the other, not one inside another, and return "
          "from a forward what backward is to go through");
    }
  }
  if (!switches_.is_last_backward) {
    waits_for_last_ = std::any_of(units_.begin(), units_.end(),
                                  [](const auto* unit) { return unit->progress_.unpublished; });
    return;
  }
  waits_for_last_ = false;
  reducer_.finish_all();
  publisher_.publish(switches_, marks());
}

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
  // Autograd does not list the root of a graph among its nodes.
  if (first == &entry) return true;
  const Node* checkpoint = entry.checkpoint;
  if (first != nullptr && checkpoint != nullptr && checkpoint == first->checkpoint) return true;
  return any_in_this_backward(entry.at_results) || is_in_this_backward(checkpoint);
}

}  // namespace

BackwardView Runtime::view_of_backward(const Entry* first) const {
  BackwardView view;
  if (!under_way_.empty()) view.actions_done = under_way_.back().pass.done;
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

std::string Runtime::memory_lines() const {
  std::string text;
  for (const auto* unit : units_) {
    if (unit->always_unsharded() || !(unit->gathered() || unit->gather_pending())) continue;
    text += concat(unit->shown_name(), "\n");
  }
  return text;
}

/// Ranks with equal hash_of_agreed() have equal frames.
ViewFrame Runtime::frame_of_views() const {
  ViewFrame frame;
  if (!under_way_.empty()) frame.actions = under_way_.back().pass.plan->actions.size();
  for (const auto& past : forwards_.past()) {
    frame.forwards.emplace(past.forward->number, past.forward->trace.units.size());
  }
  return frame;
}

std::uint64_t Runtime::hash_of_agreed() const {
  Hasher hash;
  hash.add(std::string_view(model_)).add(std::uint64_t{forwards_.count()});
  hash.add(static_cast<std::uint64_t>(under_way_.size())).add(frame_of_views().actions);
  for (const auto& past : forwards_.past()) {
    hash.add(std::uint64_t{past.forward->number}).add(past.forward->trace.hash());
  }
  if (step_ != nullptr) hash.add(std::string_view(step_->action_as_text()));
  return hash.add(std::string_view(memory_lines())).add(std::string_view(controls_)).digest();
}

std::string calls_differ(const std::string& what, const std::string& difference) {
  return concat(what, difference, "; walk through one list on every rank of a stage");
}

std::string units_differ(const std::string& difference) {
  return concat("the order of units differs between ranks: ", difference,
                "; run the same units in the same order on every rank");
}

/// Throws an error that names the first difference. Every rank calls it, since hashes differ.
/// Errors: kComm, kUsage.
void Runtime::name_difference() {
  const auto models = difference_between_ranks(model_, "models of a backward");
  TESSERA_CHECK(models.empty(), ErrorKind::kUsage, "backwards of different models meet: ", models,
                " (numbered as they were sharded); on every rank run the backwards of the same "
                "models in the same order, each through some result of its model");
  agree_on_controls();
  const auto action = difference_between_ranks(
      step_ != nullptr ? step_->action_as_text() : "a backward outside of a step",
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

BackwardView Runtime::agree_on_backward(const Entry* first) {
  auto agreed = any_rank_says(view_of_backward(first));
  forwards_.forget_all_but(agreed.alive);
  return agreed;
}

BackwardView Runtime::any_rank_says(const BackwardView& mine) {
  if (data_group() == nullptr) return mine;
  controls_as_text();
  const auto frame = frame_of_views();
  const auto bits = to_bits(mine, frame);
  const auto same =
      comm::all_agree(*data_group(), {hash_of_agreed(), hash_of(bits)}, "forward order");
  if (!same[0]) name_difference();
  if (same[1]) return mine;
  views_differ_ = true;
  return from_bits(comm::any_of_ranks(*data_group(), bits, "use of results"), frame);
}

/// Forwards are forgotten when a backward begins. A program that runs forwards with grad mode on
/// and never a backward forgets them here.
void Runtime::keep_forward() {
  if (forwards_.should_forget()) {
    agree_on_backward(nullptr);
    forwards_.forgot_what_it_could();
  }
  forwards_.keep_current();
}

/// Whether a backward around the one that begins will reduce the unit.
bool Runtime::is_to_be_reduced(const Unit& unit) const {
  return std::ranges::any_of(under_way_, [&](const BackwardUnderWay& outer) {
    const auto& actions = outer.pass.plan->actions;
    const PlanAction reduction{PlanAction::Kind::kReduce, unit.id()};
    return std::find(actions.begin() + static_cast<std::ptrdiff_t>(outer.pass.done), actions.end(),
                     reduction) != actions.end();
  });
}

void Runtime::plan_backward_under_way(const Entry* first) {
  const auto agreed = agree_on_backward(first);
  if (!under_way_.empty()) advance(under_way_.back().pass, agreed.actions_done);
  BackwardUnderWay next;
  StageRecord record;
  for (const auto& past : forwards_.past()) {
    const auto reached = agreed.reached.find(past.forward->number);
    if (reached == agreed.reached.end()) continue;
    next.forwards.push_back(past.forward->number);
    record.parts.push_back(past.forward->trace);
    record.reached.push_back(reached->second);
    if (auto segment = past.segment.lock()) next.segments.push_back(std::move(segment));
  }
  TESSERA_INVARIANT(record.parts.size() == agreed.reached.size(),
                    "a backward goes through a forward that is forgotten");
  if (!record.parts.empty()) forwards_.follow(record.parts.front());
  std::vector<PlanUnit> units;
  std::vector<bool> releases;
  for (const auto* unit : units_) {
    units.push_back(plan_unit(*unit));
    units.back().reduces =
        unit->trainable() && sink_.store() == nullptr && !is_to_be_reduced(*unit);
    // A backward inside another one leaves the releases to the outer one.
    releases.push_back(under_way_.empty() && unit->controls.reshard_after_forward &&
                       unit->controls.reshard_after_backward && unit->progress_.open_calls == 0);
  }
  next.pass.plan =
      std::make_shared<const PassPlan>(fsdp::plan_backward(record, std::move(units), releases));
  next.pass.number = next.forwards.empty() ? 0 : next.forwards.back();
  next.places = backward_places(record);
  for (const auto& segment : next.segments) {
    for (const auto& weak : segment->entries) {
      if (const auto entry = weak.lock()) expect(*entry);
    }
  }
  if (sink_.store() != nullptr) {
    // Deferred gradients: every reduction waits until no rank has an open ticket.
    for (const auto& part : record.parts) {
      for (const auto id : part.units) {
        const auto mark_pending = [](Unit& unit) {
          unit.progress_.pending = unit.progress_.pending || unit.trainable();
        };
        mark_pending(*units_.at(id));
        for (const auto& owner : units_[id]->owners) mark_pending(*owner);
      }
    }
  }
  next.reached = std::move(record.reached);
  under_way_.push_back(std::move(next));
}

}  // namespace tessera::fsdp
