#include "fsdp/runtime.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/hash.h"
#include "fsdp/integrity.h"
#include "fsdp/recompute.h"
#include "tessera/error.h"

namespace tessera::fsdp {
Entry::~Entry() {
  if (runtime) runtime->consume(*this);
}

Runtime::Runtime(Mesh mesh, std::int64_t in_flight_bytes)
    : mesh_(std::move(mesh)),
      pool_(std::make_shared<comm::BufferPool>(at::kCPU)),
      bytes_budget_(in_flight_bytes) {
  auto& w = world();
  const auto& shapes = mesh_.shapes();
  const auto of_several = [&](const std::vector<int>& members, const char* purpose) {
    return members.size() > 1 ? w.group(members, purpose) : std::shared_ptr<comm::Group>();
  };
  replicas_owner_ = of_several(shapes.dense().group_of(w.rank(), {axis::kReplicate}), "replicas");
  replicas_ = replicas_owner_.get();
  shard_rank_ = groups_of({.reductions = DataAxes(shapes).dense}).rank;
  const auto replica = shapes.replica_of(w.rank());
  replica_gathers_owner_ = of_several(replica, "gather");
  replica_gathers_ = replica_gathers_owner_.get();
  replica_control_ = of_several(replica, "shard control");
  data_group_owner_ = of_several(shapes.stage_of(w.rank()), "data");
  data_group_ = data_group_owner_.get();
  recoveries_ = w.recoveries();
}

Runtime::~Runtime() = default;

AxesGroups Runtime::groups_of(const layout::BucketKey& key) {
  const auto& axes = key.reductions.shard_axes;
  for (const auto& [known, groups] : groups_) {
    if (known == axes) return groups;
  }
  AxesGroups made;
  made.groups.replicas = replicas_;
  const auto members = mesh_.ranks_of({axes.begin(), axes.end()});
  if (members.size() > 1) {
    // Separate channels, so that a long reduction does not hold up the next gather. The World keeps
    // them.
    made.groups.gather = world().group(members, "gather").get();
    made.groups.reduce = world().group(members, "reduce").get();
    made.control = world().group(members, "shard control").get();
    made.rank = made.groups.gather->rank();
    made.ranks = made.groups.gather->size();
  }
  groups_.emplace_back(axes, made);
  return made;
}

layout::PlanOptions Runtime::plan_options() const {
  layout::PlanOptions options;
  options.ranks = mesh_.size_of(axis::kShard) * mesh_.size_of(axis::kContext);
  options.alignment_bytes = pool_->device().is_cuda() ? 256 : 64;
  options.mesh = mesh_.shapes();
  return options;
}

void Runtime::add_unit(Unit* unit) {
  units_.push_back(unit);
  agreed_ = controls_known_ = false;
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->id = static_cast<UnitId>(i);
}

void Runtime::remove_unit(Unit* unit) {
  try {
    finish_reductions_of(*unit);
  } catch (const std::exception&) {
    // The run has failed: what is under way is lost, and nobody waits for its gradients any more.
    std::erase_if(in_flight_, [&](const InFlight& reduction) { return reduction.unit == unit; });
  }
  if (std::erase(units_, unit) == 0) return;
  agreed_ = controls_known_ = false;
  reference_ = {};
  for (const auto& past : past_) past.forward->forgotten = true;
  past_.clear();
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->id = static_cast<UnitId>(i);
}

void Runtime::handle_is_gone(Unit& unit) {
  const auto self = shared_from_this();  // the last reference may be a unit's
  unit.has_handle = false;
  controls_known_ = false;
  const bool is_last = std::none_of(units_.begin(), units_.end(),
                                    [](const auto* other) { return other->has_handle; });
  if (is_last) {
    const auto gone = std::exchange(orphans_, {});  // what no graph has ends here
  } else {
    orphans_.push_back(unit.shared_from_this());
  }
}

void Runtime::remove_orphans() {
  if (in_backward_) return;
  for (auto& orphan : orphans_) {
    const bool is_borrowed_from = std::any_of(units_.begin(), units_.end(), [&](const auto* unit) {
      return unit->has_handle && unit->borrows_from(*orphan);
    });
    if (is_borrowed_from) continue;
    orphan->release();
    remove_unit(orphan.get());
    orphan.reset();
  }
  std::erase(orphans_, nullptr);
}

std::string Runtime::difference_between_ranks(const std::string& lines, const char* what) {
  const auto found = comm::first_that_differs(*data_group_, lines, what);
  if (!found) return "";
  const auto split = [](const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> list;
    for (std::string line; std::getline(in, line);) list.push_back(line);
    return list;
  };
  return first_difference(split(found->of_first), found->rank, split(found->of_rank));
}

void Runtime::agree_on_plan() {
  for (auto* unit : units_) {
    unit->agreed_reshard_after_forward = unit->reshard_after_forward;
    unit->divide_factor.reset();  // the contracts have it
  }
  controls_changed();
  agreed_ = data_group_ == nullptr;
  if (agreed_) return;
  std::string text;
  for (const auto* unit : units_) {
    ModelContract contract{{}, {}, {unit->contract}};
    for (const auto& p : unit->parameters()) contract.parameters.push_back(p->contract);
    for (const auto& buffer : unit->buffers) contract.buffers.push_back(buffer.contract);
    text += concat("unit ", unit->name(),
                   unit->reshard_after_forward ? ", resharded after forward" : "", "\n");
    for (const auto& bucket : unit->buckets()) {
      text += concat("bucket ", to_string(bucket->plan().key), ", ", bucket->plan().numel,
                     " elements\n");
    }
    text += to_lines(contract);
  }
  agree(text, "contracts", "shard the same model with the same policy on every rank");
  agreed_ = true;
}

void Runtime::agree(const std::string& lines, const char* what, const char* mend) {
  if (data_group_ == nullptr) return;
  if (comm::all_agree(*data_group_, {hash_bytes(lines)}, what)[0]) return;
  TESSERA_CHECK(false, ErrorKind::kContract, what,
                " differ between ranks: ", difference_between_ranks(lines, what), "; ", mend);
}

void Runtime::begin_relayout() {
  for (auto* unit : units_) unit->release();
  agreed_ = false;
  ++layout_;
}

// ---------------------------------------------------------------------------------------- forward

void Runtime::check_usable() {
  renew_after_failure();
  TESSERA_CHECK(
      !world().poisoned(), ErrorKind::kComm,
      "a sharded forward was entered after a failure of this run; call World::recover() on every "
      "rank first");
  if (in_backward_ && torch::autograd::get_current_graph_task_id() == -1) {
    reset();  // the last backward left by an exception
  }
  remove_orphans();
  if (!agreed_) agree_on_plan();
  for (auto* unit : units_) {
    check_trainable(*unit);
    unit->cast_buffers();
  }
}

bool Runtime::has_failed() const { return failed_ || recoveries_ != mesh_.world()->recoveries(); }

void Runtime::renew_after_failure() {
  // A recovery is of all ranks, also of those that had nothing under way.
  if (has_failed() && !world().poisoned()) reset();
}

void Runtime::gather_needed(Unit& unit) {
  const auto gather = [&](Unit& one) {
    check_integrity(one);
    if (one.gathered()) return;
    if (!one.gather_pending()) issue_gather(one);
    one.wait_gather();
  };
  for (const auto& lender : unit.lenders) gather(*lender);
  gather(unit);
}

void Runtime::issue_gather(Unit& unit) {
  TESSERA_CHECK(unit.has_values(), ErrorKind::kUsage, "unit ", unit.shown_name(),
                ": found parameters that never got values, expected them loaded; fill shards() and "
                "call set_loaded(), or load_state_dict()");
  if (unit.always_unsharded()) return;
  if (unit.buckets().empty()) return;
  ++gathers_issued_;
  unit.begin_gather(current_ ? current_->forward->number : 0);
}

void Runtime::prefetch_after(const Unit& unit, std::size_t position) {
  for (const auto& named : unit.forward_prefetch) {
    const auto next = named.lock();
    if (next == nullptr || !next->has_handle) continue;
    TESSERA_CHECK(&next->runtime() == this, ErrorKind::kUsage, "set_forward_prefetch of unit ",
                  unit.shown_name(), ": found unit ", next->shown_name(),
                  ", which another outermost module holds, expected units of one model");
    if (!next->gathered() && !next->gather_pending()) issue_gather(*next);
  }
  if (!unit.forward_prefetch.empty()) return;
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
  entry->generation = generation_;
  if (current_->entries.empty()) keep_forward(current_);
  current_->entries.push_back(entry);
  expect(*entry);
  return entry;
}

void Runtime::check_borrowed(const Unit& unit) const {
  for (const auto& leaf : unit.borrowed) {
    TESSERA_CHECK(leaf->owner != nullptr, ErrorKind::kUsage, "unit ", unit.shown_name(),
                  ": found that the handle which "
                  "owns its parameter ",
                  leaf->name, " is gone, expected it to live; keep the outermost handle");
    TESSERA_CHECK(
        unit.borrows_from(*leaf->owner->unit), ErrorKind::kUsage, "unit ", unit.shown_name(),
        ": found the parameter ", leaf->owner->contract.name, " that unit ",
        leaf->owner->unit->shown_name(),
        " owns, expected a common parent of both that is sharded; call fully_shard on it");
  }
}

std::uint64_t Segment::weights_now() const {
  std::uint64_t version = 0;
  for (const auto& unit : units) version += unit->weights_version();
  return version;
}

/// Of the outermost checkpoint that runs for the first time; 0 outside of any. Counted here: the
/// same on every rank.
std::uint32_t Runtime::checkpoint_number() {
  const auto* recorded = first_forward();
  if (recorded == nullptr || at::GradMode::is_enabled()) return 0;
  if (std::exchange(checkpoint_serial_, recorded->serial) != recorded->serial) ++checkpoints_;
  return checkpoints_;
}

std::shared_ptr<Entry> Runtime::enter_forward(Unit& unit) {
  if (open_.empty()) {
    check_usable();
    current_ = std::make_shared<Segment>();
    current_->forward = std::make_shared<PastForward>();
    current_->forward->number = next_segment_++;
    for (auto* each : units_) current_->units.push_back(each->shared_from_this());
    current_->weights = current_->weights_now();
    release_stale();
    follows_reference_ = !reference_.units.empty();
  }
  if (auto* kept = std::exchange(kept_, nullptr); kept != nullptr && kept != &unit) {
    kept->release();  // the forward goes on: its backward does not come first
  }
  ++unit.open_calls;
  auto& trace = current_->forward->trace;
  const auto position = trace.units.size();
  open_.push_back(position);
  trace.units.push_back(unit.id);
  trace.checkpoints.push_back(checkpoint_number());
  follows_reference_ = follows_reference_ && position < reference_.units.size() &&
                       reference_.units[position] == unit.id;
  check_borrowed(unit);
  gather_needed(unit);
  prefetch_after(unit, position);
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
      ErrorKind::kUsage, "recomputation: found a call of unit ", unit.shown_name(),
      " that the first forward did not make at this place, expected the same calls; make the "
      "checkpointed function deterministic");
  TESSERA_CHECK(unit.unshard_in_backward || unit.gathered(), ErrorKind::kUsage,
                "recomputation: ", "found unit ", unit.shown_name(),
                " with set_unshard_in_backward(false), expected true where a forward runs again");
  auto entry = recorded->entries[recorded->next++];
  ++unit.open_calls;
  pre_backward(*entry);
  if (auto* inner = first_forward(); inner != nullptr && !at::GradMode::is_enabled()) {
    // A checkpoint inside this one runs it for the first time: backward goes through its own
    // recomputation.
    inner->entries.push_back(entry);
  }
  unit.renew_accumulators();
  spans_.recomputation_begins(unit.name());
  return entry;
}

bool Runtime::gives_back(const Unit& unit) const {
  if (recomputing() != nullptr) return false;
  if (unit.reshard_after_forward) return true;
  const bool grad = at::GradMode::is_enabled() || first_forward() != nullptr;
  return !grad && open_.size() == 1 && !unit.outlasts_evaluation();
}

void Runtime::leave_forward(Unit& unit) {
  spans_.forward_ends();
  --unit.open_calls;
  if (recomputing() != nullptr) return;
  const bool ends_its_use = gives_back(unit);
  auto& trace = current_->forward->trace;
  trace.exits.push_back(open_.back());
  open_.pop_back();
  const bool outermost = open_.empty();
  const bool grad = at::GradMode::is_enabled() || first_forward() != nullptr;
  const bool is_last = follows_reference_ && trace.units.size() == reference_.units.size() &&
                       reference_.units.back() == unit.id && trace.units.back() == unit.id;
  if (!in_backward_ && unit.open_calls == 0 && ends_its_use) {
    // The last unit's backward comes first: its memory stays.
    if (grad && is_last && !outermost) {
      kept_ = &unit;
    } else {
      unit.release();
    }
  }
  if (!outermost) return;
  if (!grad && !in_backward_) {
    for (auto* each : units_) {
      if (each->open_calls == 0 && !each->outlasts_evaluation()) each->release();
    }
  }
  kept_ = nullptr;
  current_.reset();
}

void Runtime::fail(const std::string& why) {
  failed_ = true;
  ++generation_;
  open_.clear();
  spans_.forget();
  kept_ = nullptr;
  current_.reset();
  under_way_.clear();
  if (world().size() > 1) world().poison(why);
}

void Runtime::require_idle(const char* what) const {
  TESSERA_CHECK(
      outstanding_ == 0, ErrorKind::kUsage, what, ": found ", outstanding_,
      " unit forwards whose backward has not run, expected none; run backward first, or let the "
      "loss go out of scope");
  require_none_owed(what);
}

void Runtime::reset() {
  // Nothing is waited for: what was under way when the run failed is lost.
  in_flight_.clear();
  bytes_in_flight_ = 0;
  sink_.drop_tickets();
  store_.drop();
  for (auto* unit : units_) {
    unit->open_calls = unit->tickets = unit->expected = 0;
    unit->owed = unit->unpublished = false;
    unit->abandon_gather();
    for (auto& bucket : unit->buckets()) bucket->drop_gradients();
    for (auto& p : unit->parameters()) {
      // What was published is part of a sum that is gone.
      p->lost = p->lost || (p->published && p->shard.grad().defined());
      if (p->published) p->shard.mutable_grad().reset();
      p->seen_grad = at::Tensor();
      p->used = p->published = false;
    }
  }
  open_.clear();
  outstanding_ =
      0;  // entries that live on, in graphs that somebody holds, are of a step that is lost
  if (!has_scaler_) loss_scale_ = 1.0;
  controls_changed();
  ++generation_;
  recoveries_ = world().recoveries();
  next_segment_ = 0;
  agreed_ = false;
  current_.reset();
  kept_ = nullptr;
  past_.clear();
  past_limit_ = kPastForwards;
  checkpoint_serial_ = 0;
  checkpoints_ = 0;
  under_way_.clear();
  reference_ = {};
  in_backward_ = failed_ = awaiting_tickets_ = holds_reductions_ = waits_for_last_ = false;
}

}  // namespace tessera::fsdp
