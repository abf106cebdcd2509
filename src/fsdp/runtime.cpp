#include "fsdp/runtime.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/hash.h"
#include "fsdp/recompute.h"
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

std::vector<int> ranks_of(const Mesh& mesh, const std::vector<std::string_view>& axes) {
  return mesh.shape().group_of(mesh.world()->rank(), axes);
}

}  // namespace

Entry::~Entry() {
  if (runtime) runtime->consume(*this);
}

Runtime::Runtime(Mesh mesh, std::int64_t in_flight_bytes)
    : mesh_(std::move(mesh)),
      pool_(std::make_shared<comm::BufferPool>(at::kCPU)),
      bytes_budget_(in_flight_bytes) {
  auto& w = world();
  const auto shard = ranks_of(mesh_, {axis::kShard, axis::kContext});
  const auto replicas = ranks_of(mesh_, {axis::kReplicate});
  const auto data = ranks_of(mesh_, {axis::kReplicate, axis::kShard, axis::kContext});
  if (shard.size() > 1) {
    // Separate channels, so that a long reduction does not hold up the next gather.
    gather_group_ = w.group(shard, "gather");
    reduce_group_ = w.group(shard, "reduce");
    shard_control_ = w.group(shard, "shard control");
    shard_rank_ = gather_group_->rank();
  }
  if (replicas.size() > 1) replica_group_ = w.group(replicas, "replicas");
  if (data.size() > 1) {
    data_group_owner_ = w.group(data, "data");
    data_group_ = data_group_owner_.get();
  }
  groups_ = {gather_group_.get(), reduce_group_.get(), replica_group_.get()};
  recoveries_ = w.recoveries();
}

Runtime::~Runtime() = default;

layout::PlanOptions Runtime::plan_options() const {
  layout::PlanOptions options;
  options.ranks = gather_group_ ? gather_group_->size() : 1;
  options.alignment_bytes = pool_->device().is_cuda() ? 256 : 64;
  return options;
}

void Runtime::add_unit(Unit* unit) {
  units_.push_back(unit);
  agreed_ = false;
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->id = static_cast<UnitId>(i);
}

void Runtime::remove_unit(Unit* unit) {
  std::erase(units_, unit);
  agreed_ = false;
  reference_ = {};
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->id = static_cast<UnitId>(i);
}

void Runtime::agree_on_plan() {
  agreed_ = true;
  if (data_group_ == nullptr) return;
  std::string text;
  for (const auto* unit : units_) {
    std::vector<GradContract> contracts;
    for (const auto& p : unit->parameters()) contracts.push_back(p->contract);
    text += concat("unit ", unit->name(),
                   unit->reshard_after_forward ? ", resharded after forward" : "", "\n");
    for (const auto& bucket : unit->buckets()) {
      text += concat("bucket ", to_string(bucket->plan().key), ", ", bucket->plan().numel,
                     " elements\n");
    }
    for (const auto& c : contracts) text += concat(c.name, " ", hash({c}), "\n");
  }
  const auto mine = concat(hash_bytes(text));
  const auto all = comm::all_gather_bytes(*data_group_, mine, "contract hash");
  if (std::all_of(all.begin(), all.end(), [&](const auto& other) { return other == mine; })) return;
  const auto texts = comm::all_gather_bytes(*data_group_, text, "contracts");
  std::vector<std::vector<std::string>> lines(texts.size());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream in(texts[rank]);
    for (std::string line; std::getline(in, line);) lines[rank].push_back(line);
  }
  TESSERA_CHECK(false, ErrorKind::kContract,
                "contracts differ between ranks: ", first_difference(lines),
                "; shard the same model with the same policy on every rank");
}

// ---------------------------------------------------------------------------------------- forward

void Runtime::check_usable() {
  // A recovery is of all ranks, also of those that had nothing under way.
  if ((failed_ || recoveries_ != world().recoveries()) && !world().poisoned()) reset();
  TESSERA_CHECK(
      !world().poisoned(), ErrorKind::kComm,
      "a sharded forward was entered after a failure of this run; call World::recover() on every "
      "rank first");
  if (in_backward_ && torch::autograd::get_current_graph_task_id() == -1) {
    reset();  // the last backward left by an exception
  }
  if (!agreed_) agree_on_plan();
}

void Runtime::gather_needed(Unit& unit) {
  for (auto* other : unit.needs) {
    if (!other->gathered()) {
      if (!other->gather_pending()) issue_gather(*other);
      other->wait_gather();
    }
  }
  if (!unit.gathered()) {
    if (!unit.gather_pending()) issue_gather(unit);
    unit.wait_gather();
  }
}

void Runtime::issue_gather(Unit& unit) {
  if (unit.always_unsharded()) return;
  if (unit.buckets().empty()) return;
  ++gathers_issued_;
  unit.begin_gather(current_ ? current_->number : 0);
}

void Runtime::prefetch_after(std::size_t position) {
  if (!follows_reference_ || position + 1 >= reference_.units.size()) return;
  auto& next = *units_.at(reference_.units[position + 1]);
  if (!next.gathered() && !next.gather_pending()) issue_gather(next);
}

std::shared_ptr<Entry> Runtime::record(Unit& unit, std::size_t position) {
  auto entry = std::make_shared<Entry>();
  entry->runtime = shared_from_this();
  entry->unit = unit.shared_from_this();
  entry->segment = current_;
  entry->position = position;
  current_->entries.push_back(entry);
  expect(*entry);
  return entry;
}

void Runtime::check_borrowed(const Unit& unit) const {
  for (const auto& leaf : unit.borrowed) {
    TESSERA_CHECK(leaf->owner != nullptr, ErrorKind::kUsage, "unit ", unit.name(),
                  ": found that the handle which "
                  "owns its parameter ",
                  leaf->name, " is gone, expected it to live; keep the outermost handle");
    TESSERA_CHECK(
        std::find(unit.needs.begin(), unit.needs.end(), leaf->owner->unit) != unit.needs.end(),
        ErrorKind::kUsage, "unit ", unit.name(), ": found the parameter ",
        leaf->owner->contract.name, " that unit ", leaf->owner->unit->name(),
        " owns, expected a common parent of both that is sharded; call fully_shard on it");
  }
}

/// After a forward that nobody differentiated, units may still show the parameters of before the
/// last step.
void Runtime::release_stale() {
  if (outstanding_ > 0 || in_backward_) return;
  for (auto* unit : units_) {
    if (!unit->unsharded_by_user) unit->release();
  }
}

std::shared_ptr<Entry> Runtime::enter_forward(Unit& unit) {
  if (open_.empty()) {
    check_usable();
    current_ = std::make_shared<Segment>();
    current_->number = next_segment_++;
    for (auto* each : units_) current_->units.push_back(each->shared_from_this());
    release_stale();
    follows_reference_ = !reference_.units.empty();
  }
  ++unit.open_calls;
  const auto position = current_->trace.units.size();
  open_.push_back(position);
  current_->trace.units.push_back(unit.id);
  follows_reference_ = follows_reference_ && position < reference_.units.size() &&
                       reference_.units[position] == unit.id;
  check_borrowed(unit);
  gather_needed(unit);
  prefetch_after(position);
  spans_.forward_begins(unit.name());
  const bool grad = at::GradMode::is_enabled();
  if (!grad && first_forward() == nullptr) return nullptr;
  unit.renew_accumulators();
  auto entry = record(unit, position);
  if (auto* recorded = first_forward(); recorded != nullptr && !grad)
    recorded->entries.push_back(entry);
  return entry;
}

std::shared_ptr<Entry> Runtime::enter_recompute(Unit& unit) {
  auto* recorded = recomputing();
  TESSERA_CHECK(
      recorded->next < recorded->entries.size() &&
          recorded->entries[recorded->next]->unit.get() == &unit,
      ErrorKind::kUsage, "recomputation: found a call of unit ", unit.name(),
      " that the first forward did not make at this place, expected the same calls; make the "
      "checkpointed function deterministic");
  auto entry = recorded->entries[recorded->next++];
  ++unit.open_calls;
  pre_backward(*entry);
  if (auto* inner = first_forward(); inner != nullptr && !at::GradMode::is_enabled()) {
    // A checkpoint inside this one runs it for the first time: backward goes through its own
    // recomputation.
    inner->entries.push_back(entry);
    --unit.active;
  }
  unit.renew_accumulators();
  spans_.recomputation_begins(unit.name());
  return entry;
}

void Runtime::leave_forward(Unit& unit) {
  spans_.forward_ends();
  --unit.open_calls;
  if (recomputing() != nullptr) return;
  current_->trace.exits.push_back(open_.back());
  open_.pop_back();
  const bool outermost = open_.empty();
  const auto count = current_->trace.units.size();
  const bool grad = at::GradMode::is_enabled() || first_forward() != nullptr;
  const bool is_last = follows_reference_ && count == reference_.units.size() &&
                       reference_.units.back() == unit.id &&
                       current_->trace.units.back() == unit.id;
  if (unit.open_calls == 0 && (unit.reshard_after_forward || (!grad && outermost))) {
    // The last unit's backward comes first: its memory stays.
    if (grad && is_last && !outermost) {
      current_->kept_last = true;
    } else if (unit.active == 0) {
      unit.release();
    }
  }
  if (!outermost) return;
  if (!grad && outstanding_ == 0) release_all();
  current_.reset();
}

void Runtime::fail(const std::string& why) {
  failed_ = true;
  ++generation_;
  open_.clear();
  spans_.forget();
  current_.reset();
  if (world().size() > 1) world().poison(why);
}

// --------------------------------------------------------------------------------------- backward

void Runtime::begin_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  awaiting_tickets_ = false;
  // What the last backward left to the deferred gradients is still to be reduced.
  for (; reduction_cursor_ < reductions_.size(); ++reduction_cursor_) {
    units_.at(reductions_[reduction_cursor_])->owed = true;
  }
  reductions_.clear();
  reduction_cursor_ = 0;
  for (auto* unit : units_) unit->reduced = false;
  import_user_changes();
  // Nested graph tasks (recomputation) come after this one has begun; the callback is the outermost
  // one's.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::make_shared<BackwardEnd>(shared_from_this())] { end->run(); });
}

void Runtime::abandon_backward(std::uint64_t generation) {
  if (generation != generation_ || !in_backward_) return;
  fail("an exception left a backward through sharded modules");
}

void Runtime::agree_on_trace(const Segment& segment) {
  if (data_group_ == nullptr) return;
  const auto mine = concat(segment.number, ":", segment.trace.hash());
  const auto all = comm::all_gather_bytes(*data_group_, mine, "forward order");
  if (std::all_of(all.begin(), all.end(), [&](const auto& other) { return other == mine; })) return;
  std::string text;
  for (const auto id : segment.trace.units) text += concat(units_.at(id)->name(), "\n");
  const auto texts = comm::all_gather_bytes(*data_group_, text, "forward order names");
  std::vector<std::vector<std::string>> names(texts.size());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream in(texts[rank]);
    for (std::string line; std::getline(in, line);) names[rank].push_back(line);
  }
  TESSERA_CHECK(false, ErrorKind::kComm,
                "the order of units differs between ranks: ", first_difference(names),
                "; run the same units in the same order on every rank");
}

void Runtime::touch(Segment& segment, const std::shared_ptr<Segment>& owner) {
  if (segment.touched) return;
  segment.touched = true;
  agree_on_trace(segment);
  std::vector<bool> reshards;
  for (const auto* unit : units_) {
    reshards.push_back(unit->reshard_after_forward && !unit->always_unsharded() &&
                       !unit->buckets().empty());
  }
  if (segment.settled) {
    // A second backward over a retained graph: what had stayed gathered was released when the first
    // ended.
    for (const auto id : segment.order.reductions) {
      auto& unit = *units_.at(id);
      if (reshards[id] || unit.always_unsharded() || unit.buckets().empty()) continue;
      ++gathers_issued_;
      unit.begin_gather(segment.number);
    }
    segment.kept_last = false;
  }
  for (const auto& weak : segment.entries) {
    if (const auto entry = weak.lock()) expect(*entry);
  }
  segment.order = backward_order(segment.trace, reshards, segment.kept_last);
  segment.cursor = 0;
  for (const auto id : segment.order.reductions) add_reduction(id);
  // A unit that only lends its parameters (the root, when inner handles are called directly) comes
  // last.
  for (const auto id : segment.order.reductions) {
    for (const auto* lender : units_.at(id)->needs) add_reduction(lender->id);
  }
  reference_ = segment.trace;
  touched_.push_back(owner);
}

void Runtime::add_reduction(UnitId id) {
  if (std::find(reductions_.begin(), reductions_.end(), id) == reductions_.end())
    reductions_.push_back(id);
}

void Runtime::advance_gathers(Segment& segment, std::size_t until) {
  for (; segment.cursor < until && segment.cursor < segment.order.positions.size();
       ++segment.cursor) {
    const auto position = segment.order.positions[segment.cursor];
    if (!segment.order.gathers[position]) continue;
    auto& unit = *units_.at(segment.trace.units[position]);
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
    if (newer->number > segment.number) advance_gathers(*newer, newer->order.positions.size());
  }
  const auto place = segment.order.places.at(entry.position);
  advance_gathers(segment, place + 1);
  gather_needed(*entry.unit);
  advance_gathers(segment, place + 2);
  ++entry.unit->active;
  spans_.backward_begins(&entry, entry.unit->name());
}

void Runtime::post_backward(Entry& entry) {
  auto& unit = *entry.unit;
  spans_.backward_ends(&entry);
  if (unit.active > 0) --unit.active;
  consume(entry);
  if (unit.active == 0 && unit.open_calls == 0 && unit.reshard_after_forward &&
      !unit.gather_pending()) {
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
    settle_gradients();
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
  if (unit.reduced || !unit.trainable()) return;
  unit.owed = !unit.requires_sync;
  if (unit.owed) return;
  unit.reduced = true;
  comm::Batch batch;
  batch.label = {comm::Kind::kReduceScatter, unit.name(), unit.id, 0};
  std::int64_t bytes = 0;
  for (auto& bucket : unit.buckets()) {
    if (bucket->trainable()) bytes += bucket->begin_reduce(batch);
  }
  if (batch.ops.empty()) return;
  while (!in_flight_.empty() && bytes_in_flight_ + bytes > bytes_budget_) finish_oldest_reduction();
  ++reductions_issued_;
  in_flight_.push_back({&unit, queue().submit(*groups_.reduce, std::move(batch)), bytes});
  bytes_in_flight_ += bytes;
}

void Runtime::finish_oldest_reduction() {
  auto oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  oldest.work.wait();
  for (auto& bucket : oldest.unit->buckets()) bucket->finish_reduce();
  bytes_in_flight_ -= oldest.bytes;
}

void Runtime::end_backward() {
  try {
    for (auto& segment : touched_) advance_gathers(*segment, segment->order.positions.size());
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
    release_all();
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
  while (!in_flight_.empty()) finish_oldest_reduction();
  publish();
}

void Runtime::release_all() {
  for (auto* unit : units_) {
    if (unit->open_calls == 0) unit->release();
  }
}

void Runtime::require_idle(const char* what) const {
  TESSERA_CHECK(
      outstanding_ == 0, ErrorKind::kUsage, what, ": found ", outstanding_,
      " unit forwards whose backward has not run, expected none; run backward first, or let the "
      "loss go out of scope");
  sink_.require_all_redeemed();
}

void Runtime::reset() {
  // Nothing is waited for: what was under way when the run failed is lost.
  in_flight_.clear();
  bytes_in_flight_ = 0;
  sink_.drop_tickets();
  for (auto* unit : units_) {
    unit->open_calls = unit->active = unit->tickets = 0;
    unit->owed = unit->unpublished = false;
    unit->abandon_gather();
    for (auto& bucket : unit->buckets()) bucket->drop_gradients();
    for (auto& p : unit->parameters()) p->used = p->published = false;
  }
  open_.clear();
  ++generation_;
  recoveries_ = world().recoveries();
  next_segment_ = 0;
  agreed_ = false;
  current_.reset();
  touched_.clear();
  reductions_.clear();
  reduction_cursor_ = 0;
  reference_ = {};
  in_backward_ = failed_ = awaiting_tickets_ = false;
}

}  // namespace tessera::fsdp
