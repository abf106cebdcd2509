// What users switch between steps: the runtime's half, and the handle's.
//
// [Note: controls] Every switch changes which collectives are issued, or when, so it has to be the
// same on all ranks. Setting one does not communicate. What differs from the agreed plan is written
// into every label, which backends compare anyway, and into the hash that the order of a forward is
// compared by: ranks that differ find out at their next collective, which names the control.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera {
namespace fsdp {
namespace {

using Units = std::vector<Unit*>;

/// "what of a, b"; "what" alone for all of them.
void add_control(std::string& text, const std::string& what, const Units& all,
                 const std::function<bool(const Unit&)>& is_set) {
  std::string names;
  std::size_t count = 0;
  for (const auto* unit : all) {
    if (!is_set(*unit)) continue;
    names += concat(count == 0 ? " of " : ", ", unit->shown_name());
    ++count;
  }
  if (count == 0) return;
  text += concat(text.empty() ? "" : "; ", what, count == all.size() ? "" : names);
}

void add_prefetch(std::string& text, const char* what, const Unit& unit,
                  const std::vector<std::weak_ptr<Unit>>& list) {
  if (list.empty()) return;
  text += concat(text.empty() ? "" : "; ", what, " of ", unit.shown_name(), " to {");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto named = list[i].lock();
    text += concat(i == 0 ? "" : ", ", named && named->has_handle ? named->shown_name() : "(gone)");
  }
  text += "}";
}

}  // namespace

const std::string& Runtime::controls() {
  if (controls_known_) return controls_;
  std::string text;
  const auto add = [&](const char* what, const std::function<bool(const Unit&)>& is_set) {
    add_control(text, what, units_, is_set);
  };
  add("set_requires_gradient_sync(false)", [](const Unit& u) { return !u.requires_sync; });
  if (!requires_replica_reduce_) {
    text += concat(text.empty() ? "" : "; ", "set_requires_replica_reduce(false)");
  }
  if (!is_last_backward_) {
    text += concat(text.empty() ? "" : "; ", "set_is_last_backward(false)");
  }
  if (sink_.store() != nullptr) {
    text += concat(text.empty() ? "" : "; ", "set_defer_weight_gradients(true)");
  }
  if (loss_scale_ != 1.0) {
    text += concat(text.empty() ? "" : "; ", "a loss scale of 2^", std::ilogb(loss_scale_));
  }
  add("set_reshard_after_forward(true)",
      [](const Unit& u) { return u.reshard_after_forward && !u.agreed_reshard_after_forward; });
  add("set_reshard_after_forward(false)",
      [](const Unit& u) { return !u.reshard_after_forward && u.agreed_reshard_after_forward; });
  add("set_reshard_after_backward(false)", [](const Unit& u) { return !u.reshard_after_backward; });
  add("set_unshard_in_backward(false)", [](const Unit& u) { return !u.unshard_in_backward; });
  for (const auto* unit : units_) {
    if (unit->divide_factor) {
      text += concat(text.empty() ? "" : "; ", "set_gradient_divide_factor(", *unit->divide_factor,
                     ") of ", unit->shown_name());
    }
    add_prefetch(text, "set_forward_prefetch", *unit, unit->forward_prefetch);
    add_prefetch(text, "set_backward_prefetch", *unit, unit->backward_prefetch);
  }
  controls_ = std::move(text);
  marks_ = concat(model_, controls_.empty() ? "" : ", ", controls_);
  controls_known_ = true;
  return controls_;
}

const std::string& Runtime::marks() {
  controls();
  return marks_;
}

void Runtime::agree_on_controls() {
  const auto found = comm::first_that_differs(*data_group_, controls(), "runtime controls");
  if (!found) return;
  const auto shown = [](const std::string& text) { return text.empty() ? "none" : text; };
  throw Error(ErrorKind::kUsage,
              concat("runtime controls differ between ranks: rank 0 has set ",
                     shown(found->of_first), ", rank ", found->rank, " ", shown(found->of_rank),
                     "; set the same ones on every rank, at the same place"));
}

void Runtime::set_requires_replica_reduce(bool value) {
  requires_replica_reduce_ = value;
  controls_changed();
}

void Runtime::set_is_last_backward(bool value) {
  is_last_backward_ = value;
  controls_changed();
}

void Runtime::set_defer_weight_gradients(bool value) {
  renew_after_failure();
  require_idle("set_defer_weight_gradients");
  sink_.set_store(value ? &store_ : nullptr);
  controls_changed();
}

void Runtime::run_weight_gradients() {
  renew_after_failure();
  try {
    store_.run();
    if (awaiting_tickets_ && sink_.store() != nullptr && !any_rank_owes()) settle_gradients();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Runtime::require_none_owed(const char* what) const {
  sink_.require_all_redeemed(what);
  TESSERA_CHECK(!awaiting_tickets_, ErrorKind::kUsage, what,
                ": found gradients that were deferred, on this rank or another, expected none; "
                "call run_weight_gradients() on every rank first");
}

void Runtime::require_reduced(const char* what) const {
  require_none_owed(what);
  TESSERA_CHECK(!waits_for_last_, ErrorKind::kUsage, what,
                ": found reductions that wait for the last backward, expected none; call "
                "set_is_last_backward(true) before the step's last backward");
}

void Runtime::finish_reductions_of(const Unit& unit) {
  const auto is_under_way = [&] {
    return std::any_of(in_flight_.begin(), in_flight_.end(),
                       [&](const auto& reduction) { return reduction.unit == &unit; });
  };
  while (is_under_way()) finish_oldest_reduction();
}

std::vector<UnitId> Runtime::backward_prefetch_of(const Unit& unit) const {
  std::vector<UnitId> ids;
  for (const auto& named : unit.backward_prefetch) {
    const auto next = named.lock();
    if (next == nullptr || !next->has_handle) continue;
    TESSERA_CHECK(&next->runtime() == this, ErrorKind::kUsage, "set_backward_prefetch of unit ",
                  unit.shown_name(), ": found unit ", next->shown_name(),
                  ", which another outermost module holds, expected units of one model");
    ids.push_back(next->id);
  }
  return ids;
}

/// One byte a unit: a rank that owns no changed element has to gather anew all the same.
std::vector<bool> Runtime::stale_on_any_rank(const std::vector<Unit*>& kept) {
  const auto count = static_cast<std::int64_t>(kept.size());
  auto* group = replica_gathers_;
  const auto ranks = group == nullptr ? 1 : group->size();
  auto all = at::zeros({ranks, count}, at::kByte);
  auto mine = all[group == nullptr ? 0 : group->rank()];
  for (std::int64_t i = 0; i < count; ++i) {
    mine[i] = kept[static_cast<std::size_t>(i)]->is_stale() ? 1 : 0;
  }
  if (group != nullptr) {
    // On a group of gathers: a rank that keeps other units meets it with a gather, and both
    // are named.
    comm::Batch batch;
    batch.label = {comm::Kind::kAllGather, "units kept unsharded:", 0, 0, marks()};
    for (const auto* unit : kept) batch.label.unit += concat(" ", unit->shown_name());
    batch.ops.emplace_back(comm::AllGather{all.view({-1})});
    queue().submit(*group, std::move(batch)).wait();
  }
  const auto any = all.amax(0);
  std::vector<bool> stale;
  for (std::int64_t i = 0; i < count; ++i) stale.push_back(any[i].item<std::uint8_t>() != 0);
  return stale;
}

/// Units may still show the parameters of before the last step: after a forward that nobody
/// differentiated, or whose graph is kept. What is kept on purpose is compared with the shards by
/// value: torch::optim writes past version counters. A kept graph's tensors follow the next gather.
void Runtime::release_stale() {
  if (in_backward_) return;
  std::vector<Unit*> kept;
  for (auto* unit : units_) {
    if (!unit->outlasts_backward()) {
      unit->release();
    } else if (!unit->always_unsharded() && (unit->gathered() || unit->gather_pending())) {
      kept.push_back(unit);
    }
  }
  if (kept.empty()) return;
  const auto stale = stale_on_any_rank(kept);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (stale[i]) kept[i]->release();
  }
}

void Runtime::begin_unshard(Unit& unit) {
  check_usable();
  if (unit.outlasts_backward() && open_.empty() && !in_backward_ && !unit.always_unsharded() &&
      (unit.gathered() || unit.gather_pending()) && stale_on_any_rank({&unit}).front()) {
    unit.release();
  }
  if (!unit.gathered() && !unit.gather_pending()) issue_gather(unit);
  unit.unsharded_by_user = true;
}

}  // namespace fsdp

namespace {

/// The handle's unit, where `what` may be called: no forward waits for its backward, since what
/// that one issues was settled by how its forward ran.
fsdp::Unit& idle_unit(const std::shared_ptr<fsdp::Unit>& handle, const char* what) {
  auto& unit = fsdp::unit_of_handle(handle);
  unit.runtime().renew_after_failure();
  unit.runtime().require_idle(what);
  return unit;
}

std::vector<std::weak_ptr<fsdp::Unit>> units_of(const std::vector<ShardedBase*>& handles,
                                                const char* what) {
  std::vector<std::weak_ptr<fsdp::Unit>> units;
  for (const auto* handle : handles) {
    TESSERA_CHECK(handle != nullptr, ErrorKind::kUsage, what,
                  ": found a null handle in the list, expected handles of fully_shard");
    fsdp::unit_of_handle(handle->unit());
    units.emplace_back(handle->unit());
  }
  return units;
}

}  // namespace

void ShardedBase::for_units(bool recurse, const std::function<void(ShardedBase&)>& act) {
  fsdp::unit_of_handle(unit_);
  act(*this);
  if (!recurse) return;
  for (const auto& inner : inner_) inner.handle->for_units(true, act);
}

void ShardedBase::set_requires_gradient_sync(bool value, bool recurse) {
  for_units(recurse, [&](ShardedBase& handle) { handle.unit_->requires_sync = value; });
  runtime_->controls_changed();
}

void ShardedBase::set_requires_replica_reduce(bool value) {
  fsdp::unit_of_handle(unit_).runtime().set_requires_replica_reduce(value);
}

void ShardedBase::set_is_last_backward(bool value) {
  fsdp::unit_of_handle(unit_).runtime().set_is_last_backward(value);
}

void ShardedBase::set_defer_weight_gradients(bool value) {
  fsdp::unit_of_handle(unit_).runtime().set_defer_weight_gradients(value);
}

void ShardedBase::run_weight_gradients() {
  fsdp::unit_of_handle(unit_).runtime().run_weight_gradients();
}

void ShardedBase::set_reshard_after_forward(bool value, bool recurse) {
  idle_unit(unit_, "set_reshard_after_forward");
  for_units(recurse, [&](ShardedBase& handle) {
    handle.unit_->reshard_after_forward = value;
    handle.asked_reshard_ = true;
  });
  runtime_->controls_changed();
}

void ShardedBase::set_reshard_after_backward(bool value, bool recurse) {
  idle_unit(unit_, "set_reshard_after_backward");
  for_units(recurse, [&](ShardedBase& handle) { handle.unit_->reshard_after_backward = value; });
  runtime_->controls_changed();
}

void ShardedBase::set_unshard_in_backward(bool value) {
  idle_unit(unit_, "set_unshard_in_backward").set_unshard_in_backward(value);
  runtime_->controls_changed();
}

void ShardedBase::set_forward_prefetch(const std::vector<ShardedBase*>& units) {
  idle_unit(unit_, "set_forward_prefetch").forward_prefetch =
      units_of(units, "set_forward_prefetch");
  runtime_->controls_changed();
}

void ShardedBase::set_backward_prefetch(const std::vector<ShardedBase*>& units) {
  idle_unit(unit_, "set_backward_prefetch").backward_prefetch =
      units_of(units, "set_backward_prefetch");
  runtime_->controls_changed();
}

/// Ties and merge_below_bytes move parameters to an outer unit: a factor for some of a unit's
/// parameters, or for those of others too, is not what anybody means.
void ShardedBase::require_own_parameters(bool recurse) {
  std::set<const fsdp::Unit*> units;
  std::set<const fsdp::Parameter*> own;
  for_units(recurse, [&](ShardedBase& handle) {
    units.insert(handle.unit_.get());
    for (const auto& one : handle.own_) own.insert(one.parameter);
  });
  const auto require = [&](const fsdp::Parameter& parameter, bool alone) {
    TESSERA_CHECK(alone, ErrorKind::kUsage, "set_gradient_divide_factor: found the parameter ",
                  parameter.contract.name, ", which unit ", parameter.unit->shown_name(),
                  " holds for another one, expected both or neither among the units to set; call "
                  "it on the outermost handle");
  };
  for (const auto* parameter : own) require(*parameter, units.count(parameter->unit) > 0);
  for (const auto* unit : units) {
    for (const auto& parameter : unit->parameters()) {
      require(*parameter, own.count(parameter.get()) > 0);
    }
  }
}

void ShardedBase::set_gradient_divide_factor(double factor, bool recurse) {
  idle_unit(unit_, "set_gradient_divide_factor");
  TESSERA_CHECK(
      is_divisor(factor), ErrorKind::kUsage, "set_gradient_divide_factor: found ", factor,
      ", expected a number above 0 that float32 has; the number of data ranks is the default");
  require_own_parameters(recurse);
  for_units(recurse, [&](ShardedBase& handle) {
    const auto& unit = *handle.unit_;
    for (const auto& parameter : unit.parameters()) {
      const bool waits =
          unit.owed || unit.unpublished || unit.buckets()[parameter->bucket]->has_arrivals();
      TESSERA_CHECK(!waits && !parameter->shard.grad().defined(), ErrorKind::kUsage,
                    "set_gradient_divide_factor: found a gradient of ", parameter->contract.name,
                    ", which was divided as before, expected none; call zero_grad() first");
    }
  });
  for_units(recurse, [&](ShardedBase& handle) { handle.unit_->set_divide_factor(factor); });
  runtime_->controls_changed();
}

void ShardedBase::unshard() { unshard_async().wait(); }

UnshardHandle ShardedBase::unshard_async() {
  auto& unit = fsdp::unit_of_handle(unit_);
  unit.runtime().begin_unshard(unit);
  return UnshardHandle(unit_);
}

void UnshardHandle::wait() {
  if (unit_ != nullptr) unit_->runtime().renew_after_failure();
  // Released in between, or waited for by a forward: nothing is left to do.
  if (unit_ != nullptr && unit_->unsharded_by_user && !unit_->gathered()) unit_->wait_gather();
  unit_.reset();
}

void ShardedBase::reshard() {
  auto& unit = fsdp::unit_of_handle(unit_);
  unit.runtime().renew_after_failure();
  unit.release();
}

}  // namespace tessera
