// What users switch between steps: the handle's half of controls.h.
#include <set>

#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera {
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
  for_units(recurse, [&](ShardedBase& handle) { handle.unit_->controls.requires_sync = value; });
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
    handle.unit_->controls.reshard_after_forward = value;
    handle.asked_reshard_ = true;
  });
  runtime_->controls_changed();
}

void ShardedBase::set_reshard_after_backward(bool value, bool recurse) {
  idle_unit(unit_, "set_reshard_after_backward");
  for_units(recurse,
            [&](ShardedBase& handle) { handle.unit_->controls.reshard_after_backward = value; });
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
      const bool waits = unit.progress().owed || unit.progress().unpublished ||
                         unit.buckets()[parameter->bucket]->has_arrivals();
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
  if (unit_ != nullptr) unit_->runtime().wait_unshard(*unit_);
  unit_.reset();
}

void ShardedBase::reshard() {
  auto& unit = fsdp::unit_of_handle(unit_);
  unit.runtime().renew_after_failure();
  unit.release();
}

}  // namespace tessera
