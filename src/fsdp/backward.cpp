// The backward half of Runtime: when gathers and reductions go out, and what the end of the
// outermost graph task settles.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>

#include "base/hash.h"
#include "fsdp/runtime.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Rides in the graph task's callback: when an exception ends the backward, it is destroyed without
/// having run.
class BackwardEnd {
 public:
  explicit BackwardEnd(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), generation_(runtime_->generation()) {}
  ~BackwardEnd() {
    try {
      if (runtime_) runtime_->abandon_backward(generation_);
    } catch (const std::exception&) {
      // Telling the others failed too; the exception under way says why.
    }
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  void run() { std::exchange(runtime_, nullptr)->end_backward(); }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::uint64_t generation_;
};

/// torch::autograd::grad on a leaf takes its gradient off in front of the leaf's hooks: it would
/// never be reduced, and nobody told.
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

}  // namespace

void Runtime::begin_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  store_.begin_micro_batch();
  if (awaiting_tickets_) {
    // What the last backward reduced without tickets is published with the rest.
    for (auto* unit : units_) unit->unpublished = unit->unpublished || unit->reduced;
  }
  awaiting_tickets_ = false;
  // What the last backward left to the deferred gradients is still to be reduced.
  for (; reduction_cursor_ < reductions_.size(); ++reduction_cursor_) {
    auto& unit = *units_.at(reductions_[reduction_cursor_]);
    unit.owed = unit.owed || unit.trainable();
  }
  reductions_.clear();
  reduction_cursor_ = 0;
  for (auto* unit : units_) unit->reduced = false;
  // Nested graph tasks (recomputation) come after this one has begun; the callback is the outermost
  // one's. Whatever throws from here on ends as a failure of all ranks.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::make_shared<BackwardEnd>(shared_from_this())] { end->run(); });
  TESSERA_CHECK(has_scaler_ || loss_scale_ == 1.0, ErrorKind::kUsage,
                "backward: found gradients at the loss scale ", loss_scale_,
                " of a GradScaler that ended in the middle of a step, expected it to live on; keep "
                "it as long as the model trains, or recover the World");
  for (const auto* unit : units_) refuse_capture(*unit);
  import_user_changes();
}

void Runtime::abandon_backward(std::uint64_t generation) {
  if (generation != generation_ || !in_backward_) return;
  fail("an exception left a backward through sharded modules");
}

bool Runtime::agree_on_trace(const Segment& segment) {
  if (data_group_ == nullptr) return true;
  const std::string differentiated(segment.differentiated.begin(), segment.differentiated.end());
  const std::array<std::uint64_t, 2> hashes{Hasher()
                                                .add(segment.trace.hash())
                                                .add(std::uint64_t{segment.number})
                                                .add(std::string_view(controls()))
                                                .digest(),
                                            hash_bytes(differentiated)};
  const std::string mine(reinterpret_cast<const char*>(hashes.data()), sizeof hashes);
  const auto all = comm::all_gather_fixed(*data_group_, mine, "forward order");
  const auto agree = [&](std::size_t bytes) {
    return std::ranges::all_of(
        all, [&](const auto& other) { return other.compare(0, bytes, mine, 0, bytes) == 0; });
  };
  if (agree(sizeof hashes[0])) return agree(sizeof hashes);
  agree_on_controls();
  std::string text;
  const auto& units = segment.trace.units;
  for (const auto id : units) text += concat(units_.at(id)->shown_name(), "\n");
  for (const auto position : segment.trace.exits) {
    text += concat("the end of ", units_.at(units.at(position))->shown_name(), "\n");
  }
  text += concat("no other unit in forward ", segment.number, "\n");
  TESSERA_CHECK(false, ErrorKind::kComm, "the order of units differs between ranks: ",
                difference_between_ranks(text, "forward order names"),
                "; run the same units in the same order on every rank");
  return false;
}

void Runtime::touch(Segment& segment, const std::shared_ptr<Segment>& owner) {
  if (segment.touched) return;
  TESSERA_CHECK(
      segment.weights == segment.weights_now(), ErrorKind::kUsage,
      "backward: found parameters that were changed since this forward, expected those "
      "that it computed with; run every backward of a forward before the optimizer steps");
  segment.touched = true;
  segment.task = torch::autograd::get_current_graph_task_id();
  finish_newer(segment);
  const bool alike = agree_on_trace(segment);
  std::vector<bool> gathers, keeps;           // in backward; after forward
  std::vector<std::vector<UnitId>> prefetch;  // empty where no unit has a list
  for (const auto* unit : units_) {
    const bool moves =
        unit->unshard_in_backward && !unit->always_unsharded() && !unit->buckets().empty();
    gathers.push_back(moves && unit->reshard_after_forward);
    keeps.push_back(moves && !unit->reshard_after_forward);
    if (unit->backward_prefetch.empty()) continue;
    prefetch.resize(units_.size());
    prefetch[unit->id] = backward_prefetch_of(*unit);
  }
  if (segment.settled || segment.number + 1 != next_segment_) {
    // What had stayed gathered was released: when another backward over this graph ended, or when a
    // later forward began.
    for (const auto id : segment.order.reductions) {
      if (!keeps[id]) continue;
      ++gathers_issued_;
      units_.at(id)->begin_gather(segment.number);
    }
    segment.kept_last = false;
  }
  for (const auto& weak : segment.entries) {
    if (const auto entry = weak.lock()) expect(*entry);
  }
  segment.order = backward_order(segment.trace, gathers, segment.kept_last, prefetch,
                                 alike ? segment.differentiated : std::vector<bool>());
  segment.cursor = 0;
  add_reductions(segment);
  reference_ = segment.trace;
  touched_.push_back(owner);
}

/// A graph task takes nodes in reverse of the order in which forwards made them: once it is at this
/// forward, nothing of a newer one is left to run in it. So what newer ones owe goes out now, on
/// every rank at the same place; a rank that had no use for a unit there would keep the others
/// waiting for its part, and wait for them in what comes next. A nested task may be inside a node
/// of a newer forward, which then is not at its end.
void Runtime::finish_newer(const Segment& segment) {
  bool any = false;
  for (auto& newer : touched_) {
    if (newer->number < segment.number || newer->task < segment.task) continue;
    any = true;
    for (const auto& weak : newer->entries) {
      if (const auto entry = weak.lock()) consume(*entry);
    }
  }
  if (!any) return;
  for (auto* unit : units_) unit->active = 0;
  issue_ready_reductions();
}

/// A unit is reduced once a backward, after the last of its forwards. But what an earlier backward
/// has reduced already, and this one goes through again (a graph that was retained, below a newer
/// forward), was not waited for when the newer forward's share went out: it has a reduction of its
/// own. Which of the two it is, all ranks know: backwards end on all of them.
void Runtime::add_reductions(const Segment& segment) {
  std::vector<UnitId> units = segment.order.reductions;
  const auto add = [](std::vector<UnitId>& list, UnitId id) {
    if (std::find(list.begin(), list.end(), id) == list.end()) list.push_back(id);
  };
  // A unit that only lends its parameters (the root, when inner handles are called directly) comes
  // last.
  for (const auto id : segment.order.reductions) {
    for (const auto* lender : units_.at(id)->needs) add(units, lender->id);
  }
  if (segment.settled) {
    reductions_.insert(reductions_.end(), units.begin(), units.end());
  } else {
    for (const auto id : units) add(reductions_, id);
  }
}

void Runtime::advance_gathers(Segment& segment, std::size_t count) {
  for (; segment.cursor < count; ++segment.cursor) {
    auto& unit = *units_.at(segment.trace.units[segment.order.issues.at(segment.cursor)]);
    ++gathers_issued_;
    unit.begin_gather(segment.number);
  }
}

void Runtime::pre_backward(Entry& entry) {
  begin_backward();
  auto& segment = *entry.segment;
  touch(segment, entry.segment);
  // Newer forwards come first in every backward; what they still owe goes out before.
  for (auto& newer : touched_) {
    if (newer->number > segment.number) advance_gathers(*newer, newer->order.issues.size());
  }
  const auto place = segment.order.places.at(entry.position);
  advance_gathers(segment, segment.order.needed[place]);
  gather_needed(*entry.unit, Gathers::kInBackward);
  advance_gathers(segment, segment.order.ahead[place]);
  ++entry.unit->active;
  spans_.backward_begins(&entry, entry.unit->name());
}

void Runtime::post_backward(Entry& entry) {
  auto& unit = *entry.unit;
  spans_.backward_ends(&entry);
  if (unit.active > 0) --unit.active;
  consume(entry);
  if (unit.active == 0 && unit.open_calls == 0 && unit.reshard_after_forward &&
      unit.reshard_after_backward && !unit.gather_pending()) {
    unit.release();
  }
  issue_ready_reductions();
}

void Runtime::expect(Entry& entry) {
  if (!entry.consumed) return;
  entry.consumed = false;
  ++outstanding_;
  ++entry.unit->expected;
  for (auto* lender : entry.unit->needs) ++lender->expected;
}

void Runtime::consume(Entry& entry) {
  if (entry.consumed) return;
  entry.consumed = true;
  --outstanding_;
  --entry.unit->expected;
  for (auto* lender : entry.unit->needs) --lender->expected;
}

void Runtime::on_gradient() {
  if (!awaiting_tickets_) begin_backward();
}

void Runtime::on_tickets_closed(Unit&) {
  if (in_backward_) {
    issue_ready_reductions();
  } else if (awaiting_tickets_ && sink_.open_tickets() == 0) {
    awaiting_tickets_ = false;
    try {
      settle_gradients();
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    }
  }
}

void Runtime::issue_ready_reductions() {
  while (reduction_cursor_ < reductions_.size()) {
    auto& unit = *units_.at(reductions_[reduction_cursor_]);
    if (unit.expected > 0 || unit.active > 0 || unit.tickets > 0) return;
    issue_reduction(unit);
    ++reduction_cursor_;
  }
}

void Runtime::issue_reduction(Unit& unit) {
  if (!unit.trainable()) return;
  unit.owed = !unit.requires_sync;
  if (unit.owed) return;
  unit.reduced = true;
  finish_reductions_of(unit);  // of earlier micro-batches
  unit.for_groups(&BucketGroups::reduce, [&](comm::Group* group) { issue_reduction(unit, group); });
}

void Runtime::issue_reduction(Unit& unit, comm::Group* group) {
  comm::Batch batch;
  batch.label = {comm::Kind::kReduceScatter, unit.shown_name(), unit.id, 0, controls()};
  std::int64_t bytes = 0;
  for (auto& bucket : unit.buckets()) {
    if (bucket->groups().reduce != group || !bucket->trainable()) continue;
    bytes += bucket->begin_reduce(batch);
  }
  if (batch.ops.empty()) return;
  while (!in_flight_.empty() && bytes_in_flight_ + bytes > bytes_budget_) finish_oldest_reduction();
  ++reductions_issued_;
  in_flight_.push_back({&unit, group, queue().submit(*group, std::move(batch)), bytes});
  bytes_in_flight_ += bytes;
}

void Runtime::finish_oldest_reduction() {
  auto oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  oldest.work.wait();
  for (auto& bucket : oldest.unit->buckets()) {
    if (bucket->groups().reduce == oldest.group) bucket->finish_reduce();
  }
  bytes_in_flight_ -= oldest.bytes;
}

void Runtime::end_backward() {
  try {
    for (auto& segment : touched_) advance_gathers(*segment, segment->order.issues.size());
    // Entries without a marker have had their last use: nothing of this backward is left to run.
    for (auto* unit : units_) unit->active = 0;
    for (auto& segment : touched_) {
      segment->touched = false;
      segment->settled = true;
      for (const auto& weak : segment->entries) {
        if (const auto entry = weak.lock()) consume(*entry);
      }
    }
    touched_.clear();
    spans_.all_backwards_end();
    for (auto* unit : units_) {
      if (unit->open_calls == 0 && unit->reshard_after_backward) unit->release();
    }
    if (sink_.open_tickets() > 0) {
      awaiting_tickets_ = true;
      in_backward_ = false;
      return;
    }
    settle_gradients();
    in_backward_ = false;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Runtime::settle_gradients() {
  const at::NoGradGuard no_grad;
  for (; reduction_cursor_ < reductions_.size(); ++reduction_cursor_) {
    issue_reduction(*units_.at(reductions_[reduction_cursor_]));
  }
  // Units that only earlier backwards, without sync, have reached.
  for (auto* unit : units_) {
    if (unit->owed) issue_reduction(*unit);
  }
  for (auto* unit : units_) {
    unit->unpublished = unit->unpublished || unit->reduced;
    for (const auto& bucket : unit->buckets()) {
      TESSERA_CHECK(
          !unit->reduced || !bucket->trainable() || !bucket->has_arrivals(), ErrorKind::kContract,
          "unit ", unit->shown_name(),
          ": found gradients that arrived after its reduction, expected all of a backward "
          "before; run backwards one after the other, not one inside another");
    }
  }
  if (!is_last_backward_) {
    waits_for_last_ = std::any_of(units_.begin(), units_.end(),
                                  [](const auto* unit) { return unit->unpublished; });
    return;
  }
  waits_for_last_ = false;
  while (!in_flight_.empty()) finish_oldest_reduction();
  publish();
}

}  // namespace tessera::fsdp
