#include "fsdp/runtime/runtime.h"

#include <ATen/ATen.h>

#include <sstream>

#include "base/hash.h"
#include "base/interrupt.h"
#include "base/threads/backward_pass.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "launch/abort_flag.h"
#include "layout/alignment.h"
#include "tessera/error.h"

namespace tessera::fsdp {
Runtime::Runtime(Mesh mesh, std::optional<std::int64_t> in_flight_bytes)
    : groups_(std::move(mesh)),
      pool_(std::make_shared<comm::BufferPool>(world().device())),
      reducer_(in_flight_bytes, device()),
      recoveries_(world().recoveries()) {
  sink_.set_under_exchange(&under_exchange_);
}

Runtime::~Runtime() = default;

layout::PlanOptions Runtime::plan_options() const {
  layout::PlanOptions options;
  options.ranks = mesh().size_of(axis::kShard) * mesh().size_of(axis::kContext);
  options.alignment_bytes = device().is_cpu() ? layout::kHostAlignment : layout::kDeviceAlignment;
  options.mesh = mesh().shapes();
  return options;
}

void Runtime::number_units() {
  agreed_ = controls_known_ = false;
  planning_.known.clear();
  if (step_ != nullptr) step_->units_changed();
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->id_ = static_cast<UnitId>(i);
}

HeldUnits Runtime::held_units() const {
  auto units = std::make_shared<std::vector<std::shared_ptr<Unit>>>();
  for (auto* unit : units_) units->push_back(unit->shared_from_this());
  return units;
}

void Runtime::add_unit(Unit* unit) {
  units_.push_back(unit);
  number_units();
}

void Runtime::remove_unit(Unit* unit) {
  const base::NoInterrupts until_it_is_gone;
  try {
    // Reductions from before a recovery are lost on every rank; nothing waits for them.
    if (recoveries_ == world().recoveries()) reducer_.finish(*unit);
  } catch (const std::exception&) {
    // The run has failed: its gradients are not needed any more.
  }
  reducer_.drop(*unit);
  if (entered_ == unit) entered_ = nullptr;
  if (std::erase(units_, unit) == 0) return;
  forwards_.forget_units();
  number_units();
}

void Runtime::handle_is_gone(Unit& unit) {
  const auto self = shared_from_this();  // the last reference may be a unit's
  unit.has_handle_ = false;
  controls_known_ = false;
  const bool is_last = std::none_of(units_.begin(), units_.end(),
                                    [](const auto* other) { return other->has_handle(); });
  if (is_last) {
    const auto gone = std::exchange(orphans_, {});  // destroys the units that no graph keeps
  } else {
    orphans_.push_back(unit.shared_from_this());
  }
}

void Runtime::remove_orphans() {
  if (in_backward_) return;
  for (auto& orphan : orphans_) {
    const bool is_used = std::any_of(units_.begin(), units_.end(), [&](const auto* unit) {
      return unit->has_handle() && unit->has_owner(*orphan);
    });
    if (is_used) continue;
    orphan->release();
    remove_unit(orphan.get());
    orphan.reset();
  }
  std::erase(orphans_, nullptr);
}

std::string Runtime::difference_between_ranks(const std::string& lines, const char* what) {
  const auto found = comm::first_that_differs(*data_group(), lines, what);
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
    unit->controls.agreed_reshard_after_forward = unit->controls.reshard_after_forward;
    unit->controls.divide_factor.reset();  // the contracts have it already
  }
  controls_changed();
  agreed_ = data_group() == nullptr;
  if (agreed_) return;
  std::string text;
  for (const auto* unit : units_) {
    ModelContract contract{{}, {}, {unit->contract}};
    for (const auto& p : unit->parameters()) contract.parameters.push_back(p->contract);
    for (const auto& buffer : unit->buffers) contract.buffers.push_back(buffer.contract);
    text += concat("unit ", unit->name(),
                   unit->controls.reshard_after_forward ? ", resharded after forward" : "", "\n");
    for (const auto& bucket : unit->buckets()) {
      text += concat("bucket ", to_string(bucket->plan().key), ", ", bucket->plan().numel,
                     " elements\n");
    }
    text += to_lines(contract);
  }
  agree(text, "contracts", "shard the same model with the same policy on every rank");
  agreed_ = true;
}

void Runtime::agree(const std::string& lines, const char* what, const char* hint) {
  if (data_group() == nullptr) return;
  if (comm::all_agree(*data_group(), {hash_bytes(lines)}, what)[0]) return;
  TESSERA_CHECK(false, ErrorKind::kContract, what,
                " differ between ranks: ", difference_between_ranks(lines, what), "; ", hint);
}

void Runtime::name_model() {
  std::uint64_t others = 0;
  // Ranks with different stages of a pipeline may have named different numbers of models so far.
  if (mesh().size_of(axis::kPipeline) > 1) world().note_stages();
  if (world().had_stages() && data_group() != nullptr) {
    const auto mine = std::to_string(world().models_named());
    for (const auto& text : comm::all_gather_bytes(*data_group(), mine, "models so far")) {
      others = std::max<std::uint64_t>(others, std::stoull(text));
    }
  }
  model_ = world().next_model_name(others);
  controls_changed();
}

std::string Runtime::last_entered() const {
  if (entered_ == nullptr) return "";
  return concat("the ", entered_by_, " of unit ", entered_->shown_name());
}

void Runtime::are_read(const comm::Event& end) {
  order_after_reads();  // those of an earlier copy
  read_until_ = end;
}

void Runtime::order_after_reads() {
  read_until_.block(comm::Stream::current(device()), comm::EventSite::kSnapshotEnd);
}

void Runtime::begin_relayout() {
  order_after_reads();
  for (auto* unit : units_) unit->release();
  agreed_ = false;
  planning_.known.clear();
  if (regions_ != nullptr) regions_->forget();
  ++layout_;
}

// ---------------------------------------------------------------------------------------- forward

void Runtime::require_recovered() const {
  TESSERA_CHECK(!world().closed(), ErrorKind::kUsage,
                "a sharded forward: found its World closed, expected one that is open; close it "
                "behind the last step");
  if (!world().aborted()) return;
  try {
    comm::barrier(world().control(), "after a failure");  // throws with the reason
  } catch (const comm::LostRank& error) {
    throw comm::LostRank(concat("a sharded forward was entered after a failure of this run (",
                                error.what(),
                                "); recover the World on every rank first (World::recover, "
                                "world.recover() in Python)"));
  }
}

void Runtime::check_usable() {
  if (!has_failed() && in_backward_ && !base::in_backward_pass()) {
    fail(kAbandoned);  // BackwardEnd will be destroyed later, by another thread
  }
  renew_after_failure();
  require_recovered();
  remove_orphans();
  if (!agreed_) agree_on_plan();
  for (auto* unit : units_) {
    check_trainable(*unit);
    unit->cast_buffers();
  }
}

/// Returns the number of the forward or micro-batch under way, for labels of gathers.
std::uint32_t Runtime::number_of_forward() const {
  if (step_ != nullptr) return step_->micro_batch();
  return forwards_.current() ? forwards_.current()->forward->number : 0;
}

std::vector<std::shared_ptr<Unit>> Runtime::living(const std::vector<std::weak_ptr<Unit>>& named,
                                                   const char* control, const Unit& of) const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& one : named) {
    auto next = one.lock();
    if (next == nullptr || !next->has_handle()) continue;
    TESSERA_CHECK(&next->runtime() == this, ErrorKind::kUsage, control, " of unit ",
                  of.shown_name(), ": found unit ", next->shown_name(),
                  ", which another outermost module holds, expected units of one model");
    units.push_back(std::move(next));
  }
  return units;
}

void Runtime::prefetch_after(const Unit& unit, std::size_t position) {
  const auto prefetch = [&](Unit& next) {
    if (!next.gathered() && !next.gather_pending()) issue_gather(next, number_of_forward());
  };
  if (!unit.forward_prefetch.empty()) {
    for (const auto& next : living(unit.forward_prefetch, "set_forward_prefetch", unit)) {
      prefetch(*next);
    }
  } else if (step_ == nullptr) {  // a step that records does not know what comes next
    if (const auto next = forwards_.next_after(position)) prefetch(*units_.at(*next));
  }
}

std::shared_ptr<Entry> Runtime::record(Unit& unit, std::size_t position) {
  auto entry = std::make_shared<Entry>();
  entry->runtime = shared_from_this();
  entry->unit = unit.shared_from_this();
  entry->segment = forwards_.current();
  entry->position = position;
  entry->generation = generation_;
  if (!forwards_.has_entries() && (step_ == nullptr || step_->keeps_forwards())) keep_forward();
  forwards_.add(entry);
  expect(*entry);
  return entry;
}

void Runtime::check_shared(const Unit& unit) const {
  for (const auto& leaf : unit.owned_elsewhere) {
    TESSERA_CHECK(leaf->owner != nullptr, ErrorKind::kUsage, "unit ", unit.shown_name(),
                  ": found that the handle which "
                  "owns its parameter ",
                  leaf->name, " is gone, expected it to live; keep the outermost handle");
    TESSERA_CHECK(
        unit.has_owner(*leaf->owner->unit), ErrorKind::kUsage, "unit ", unit.shown_name(),
        ": found the parameter ", leaf->owner->contract.name, " that unit ",
        leaf->owner->unit->shown_name(),
        " owns, expected a common parent of both that is sharded; call fully_shard on it");
  }
}

std::shared_ptr<Entry> Runtime::enter_forward(Unit& unit) {
  take_up_abandoned();
  entered_ = &unit;
  entered_by_ = "forward";
  if (!forwards_.is_open() && step_ != nullptr) {
    step_->begin_outermost();
  } else if (!forwards_.is_open()) {
    check_usable();
    forget_cleared();
    auto units = held_units();
    const auto weights = weights_of(*units);
    forwards_.begin(std::move(units), weights);
    release_stale();
  }
  if (auto* kept = std::exchange(kept_, nullptr); kept != nullptr && kept != &unit) {
    kept->release();  // another unit follows, so the backward of `kept` does not come next
  }
  ++unit.progress_.open_calls;
  // The outermost checkpoint that runs for the first time, if any.
  const auto* in_checkpoint = at::GradMode::is_enabled() ? nullptr : first_forward();
  const auto checkpoint =
      in_checkpoint == nullptr ? 0 : forwards_.number_of_checkpoint(in_checkpoint->serial);
  const auto position = forwards_.enter(unit.id(), checkpoint);
  forwards_.current()->had_grad.push_back(at::GradMode::is_enabled() || first_forward() != nullptr);
  if (step_ != nullptr) step_->enter(unit, position, checkpoint);
  check_shared(unit);
  if (step_ != nullptr && !step_->records()) {
    step_->gather_for(unit, position);
  } else {
    make_readable(unit, Gathers::kHere);
    prefetch_after(unit, position);
  }
  spans_.forward_begins(unit.name());
  const bool grad = at::GradMode::is_enabled();
  unit.progress_.ran_without_grad = !grad && first_forward() == nullptr;
  if (unit.progress_.ran_without_grad) return nullptr;
  unit.renew_accumulators();
  auto entry = record(unit, position);
  if (auto* recorded = first_forward(); recorded != nullptr && !grad)
    recorded->entries.push_back(entry);
  return entry;
}

std::shared_ptr<Entry> Runtime::enter_recompute(Unit& unit) {
  auto* recorded = recomputing();
  TESSERA_CHECK(recorded->next < recorded->entries.size() &&
                    recorded->entries[recorded->next]->unit.get() == &unit,
                ErrorKind::kUsage, "recomputation: found a call of unit ", unit.shown_name(),
                " that the first forward did not make at this place, expected the same calls",
                grad::kMakeDeterministic);
  TESSERA_CHECK(unit.controls.unshard_in_backward || unit.gathered(), ErrorKind::kUsage,
                "recomputation: ", "found unit ", unit.shown_name(),
                " with set_unshard_in_backward(false), expected true where a forward runs again");
  auto entry = recorded->entries[recorded->next++];
  ++unit.progress_.open_calls;
  pre_backward(*entry);
  if (auto* inner = first_forward(); inner != nullptr && !at::GradMode::is_enabled()) {
    // A checkpoint inside this one runs the unit for the first time: the backward goes through the
    // inner checkpoint's recomputation.
    inner->entries.push_back(entry);
  }
  unit.renew_accumulators();
  spans_.recomputation_begins(unit.name());
  return entry;
}

/// Throws here, and on the other ranks, as every error of a backward does.
void Runtime::refuse_repeated(const Unit& unit, const std::string& found_and_remedy) {
  const auto message =
      concat("unit ", unit.shown_name(), ": found a forward inside a backward ", found_and_remedy);
  fail(message);
  throw Error(ErrorKind::kUsage, message);
}

bool Runtime::backward_goes_through_this() const {
  return in_backward_ || (step_ != nullptr && !step_->segments_under_way().empty()) ||
         !view_of_backward(nullptr).reached.empty();
}

std::vector<std::shared_ptr<Segment>> Runtime::segments_under_way() const {
  if (step_ != nullptr) return step_->segments_under_way();
  std::vector<std::shared_ptr<Segment>> segments;
  for (const auto& backward : under_way_) {
    segments.insert(segments.end(), backward.segments.begin(), backward.segments.end());
  }
  return segments;
}

void Runtime::require_repeats(const Unit& unit) {
  constexpr auto kReentrant =
      "whose first run was without grad mode, expected one that was recorded, since a reentrant "
      "checkpoint's is not; call torch.utils.checkpoint with use_reentrant=False";
  constexpr auto kNone =
      "that repeats no recorded forward of that backward, expected one that a checkpoint with "
      "use_reentrant=False runs again; call the model from no hook of a backward";
  const auto* const unknown = unit.progress_.ran_without_grad ? kReentrant : kNone;
  if (!RepeatedCalls::is_under_way() || !backward_goes_through_this()) {
    refuse_repeated(unit, unknown);
  }
  if (!in_backward_) {
    // The second run has set grad mode. pre_backward() checks later whether the backward has it,
    // too.
    const at::NoGradGuard no_grad;
    begin_backward();
    is_graph_unchecked_ = true;
  }
  switch (repeated_.follow(unit.id(), segments_under_way())) {
    case RepeatedCalls::Verdict::kRepeats:
      return;
    case RepeatedCalls::Verdict::kWithoutGrad:
      refuse_repeated(unit, kReentrant);
    case RepeatedCalls::Verdict::kUnknown:
      refuse_repeated(unit, unknown);
    case RepeatedCalls::Verdict::kOtherOrder: {
      std::string names;
      for (const auto id : repeated_.expected()) {
        names += concat(names.empty() ? "" : " or ", "unit ", units_.at(id)->shown_name());
      }
      refuse_repeated(unit,
                      concat("that the first run did not make at this place, expected ",
                             names.empty() ? "no other call" : names,
                             " as in the first run of the checkpoint", grad::kMakeDeterministic));
    }
  }
}

/// Gathers the unit for a repeated forward, which the plan does not know: the plan gathers the unit
/// later, for its backward. All ranks that repeat this forward come to this place. A rank that does
/// not repeat it cannot know what the others issue.
void Runtime::gather_again(Unit& unit) {
  const auto gather = [&](Unit& one) {
    if (one.gathered() || one.gather_pending() || one.always_unsharded() || one.buckets().empty()) {
      return;
    }
    if (views_differ_) {
      refuse_repeated(one,
                      "that needs its parameters before its own backward has begun, while the "
                      "backwards of ranks go through different results, expected the same on all; "
                      "use the results of the checkpoint alike on every rank, or put a checkpoint "
                      "around each unit");
    }
    issue_gather(one, number_of_forward());
    one.progress_.gathered_again = true;
  };
  for (const auto& owner : unit.owners) gather(*owner);
  gather(unit);
  make_readable(unit, Gathers::kByPlan);
}

bool Runtime::enter_repeated(Unit& unit) {
  take_up_abandoned();
  TESSERA_CHECK(base::in_backward_pass(), ErrorKind::kUsage, "unit ", unit.shown_name(),
                ": found a recomputation outside of a backward, expected a forward; make the call "
                "as CallKind::kForward");
  if (!at::GradMode::is_enabled() && !backward_goes_through_this()) return false;
  entered_ = &unit;
  entered_by_ = "recomputation";
  require_repeats(unit);
  gather_again(unit);
  unit.renew_accumulators();
  ++unit.progress_.open_calls;
  spans_.recomputation_begins(unit.name());
  return true;
}

void Runtime::leave_repeated(Unit& unit) {
  spans_.forward_ends();
  auto& progress = unit.progress_;
  --progress.open_calls;
  // Its backward reads no parameter, so that nothing else releases what was gathered here.
  if (progress.open_calls == 0 && progress.gathered_again && !unit.controls.unshard_in_backward) {
    unit.release();
  }
}

bool Runtime::reshards_after(const Unit& unit) const {
  if (recomputing() != nullptr) return false;
  if (unit.controls.reshard_after_forward) return true;
  const bool grad = at::GradMode::is_enabled() || first_forward() != nullptr;
  return !grad && forwards_.is_outermost() && !unit.controls.keeps_unsharded_in_eval();
}

void Runtime::leave_forward(Unit& unit) {
  const bool again = recomputing() != nullptr;
  spans_.forward_ends();
  --unit.progress_.open_calls;
  unit.renew_shared();
  if (again) return;
  const bool ends_its_use = reshards_after(unit);
  const bool outermost = forwards_.leave();
  if (step_ != nullptr) {
    step_->leave(unit, outermost);
    if (outermost) forwards_.end();
    return;
  }
  const bool grad = at::GradMode::is_enabled() || first_forward() != nullptr;
  if (!in_backward_ && unit.progress_.open_calls == 0 && ends_its_use) {
    // The last unit's backward comes first, so the unit stays unsharded.
    if (grad && !outermost && forwards_.is_last(unit.id())) {
      kept_ = &unit;
    } else {
      unit.release();
    }
  }
  if (!outermost) return;
  if (!grad && !in_backward_) {
    for (auto* each : units_) {
      if (each->progress_.open_calls == 0 && !each->controls.keeps_unsharded_in_eval())
        each->release();
    }
  }
  kept_ = nullptr;
  forwards_.end();
  leave_shards();
}

/// Orders later writes of the user to the shards after the gathers that read them.
void Runtime::leave_shards() const {
  if (device().is_cpu()) return;  // a gather copies them when it begins
  for (const auto* unit : units_) unit->leave_shards();
}

/// Exchanges one byte for each unit: a rank that owns no changed element has to gather again all
/// the same.
std::vector<bool> Runtime::stale_on_any_rank(const std::vector<Unit*>& kept) {
  const auto count = static_cast<std::int64_t>(kept.size());
  auto* group = groups_.replica_gathers();
  const auto ranks = group == nullptr ? 1 : group->size();
  at::Tensor all = at::zeros({ranks, count}, at::TensorOptions(at::kByte).device(device()));
  const auto mine = all[group == nullptr ? 0 : group->rank()];
  for (std::int64_t i = 0; i < count; ++i) kept[static_cast<std::size_t>(i)]->mark_stale(mine[i]);
  if (group != nullptr) {
    // Uses a group of gathers: where another rank keeps no unit, this collective meets a gather
    // there, and the error names both.
    comm::Batch batch;
    batch.label = {comm::Kind::kAllGather, "units kept unsharded:", 0, 0, marks()};
    for (const auto* unit : kept) batch.label.unit += concat(" ", unit->shown_name());
    batch.ops.emplace_back(comm::AllGather{all.view({-1})});
    queue().submit(*group, std::move(batch)).wait();
  }
  const auto any = comm::read_on_host(all, "units kept unsharded").amax(0);
  std::vector<bool> stale;
  for (std::int64_t i = 0; i < count; ++i) stale.push_back(any[i].item<std::uint8_t>() != 0);
  return stale;
}

/// Releases units that still have the parameters from before the last step: no backward came after
/// their forward, or its graph is kept.
void Runtime::release_leftovers() {
  for (auto* unit : units_) {
    if (!unit->keeps_unsharded_after_backward()) unit->release();
  }
}

/// Releases leftovers, and units that are kept unsharded on purpose but differ from the shards.
/// They are compared by value, since torch::optim writes past version counters. Tensors that a kept
/// graph has saved show the values of the next gather.
void Runtime::release_stale() {
  if (in_backward_) return;
  release_leftovers();
  std::vector<Unit*> kept;
  for (auto* unit : units_) {
    if (!unit->keeps_unsharded_after_backward() || unit->always_unsharded()) continue;
    if (unit->gathered() || unit->gather_pending()) kept.push_back(unit);
  }
  if (kept.empty()) return;
  const auto stale = stale_on_any_rank(kept);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (stale[i]) kept[i]->release();
  }
}

void Runtime::begin_unshard(Unit& unit) {
  check_usable();
  if (unit.keeps_unsharded_after_backward() && !forwards_.is_open() && !in_backward_ &&
      !unit.always_unsharded() && (unit.gathered() || unit.gather_pending()) &&
      stale_on_any_rank({&unit}).front()) {
    unit.release();
  }
  if (!unit.gathered() && !unit.gather_pending()) issue_gather(unit, number_of_forward());
  unit.progress_.unsharded_by_user = true;
  unit.leave_shards();
}

void Runtime::wait_unshard(Unit& unit) {
  renew_after_failure();
  // Nothing is left to do where the unit was released since, or where a forward has waited for it.
  if (unit.progress_.unsharded_by_user && !unit.gathered()) unit.wait_gather();
  unit.read_here();
}

}  // namespace tessera::fsdp
