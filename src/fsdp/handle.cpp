// The functions of a handle other than forward: names, shards, whole tensors, controls between
// steps (controls.h), and handle.h.
#include "fsdp/handle.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/runtime/whole.h"
#include "grad/contract_key.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera {

std::vector<ShardedBase::Own> ShardedBase::all() const {
  auto result = own_;
  for (const auto& inner : inner_) {
    for (const auto& own : inner.handle->all()) {
      result.push_back(
          {inner.handle->named_ ? own.name : inner.path + "." + own.name, own.parameter});
    }
  }
  return result;
}

torch::OrderedDict<std::string, at::Tensor> ShardedBase::named_parameters() const {
  torch::OrderedDict<std::string, at::Tensor> result("Parameter");
  std::optional<fsdp::ModelNames> of_model;  // names in an inner handle are relative to it
  if (!is_inside_) of_model.emplace(*this);
  for (const auto& own : all()) {
    const auto& contract = own.parameter->contract;
    const auto name = of_model ? of_model->of(contract).front() : contract.name;
    result.insert(name == contract.name ? own.name : name, own.parameter->shard);
  }
  return result;
}

torch::OrderedDict<std::string, at::Tensor> ShardedBase::named_buffers() const {
  fsdp::unit_of_handle(unit_);
  torch::OrderedDict<std::string, at::Tensor> result("Buffer");
  std::set<const at::TensorImpl*> seen;
  std::optional<fsdp::ModelNames> of_model;  // as in named_parameters()
  if (!is_inside_) of_model.emplace(*this);
  const auto add = [&](const std::string& name, const at::Tensor& buffer) {
    if (!buffer.defined() || !seen.insert(buffer.unsafeGetTensorImpl()).second) return;
    const auto names = of_model ? of_model->of(buffer) : std::vector<std::string>();
    result.insert(names.size() > 1 ? names.front() : name, buffer);
  };
  // Inner handles come first: they know their names, also where the tree shows their plain modules.
  for (const auto& inner : inner_) {
    for (const auto& buffer : inner.handle->named_buffers()) {
      add(inner.handle->named_ ? buffer.key() : inner.path + "." + buffer.key(), buffer.value());
    }
  }
  for (const auto& buffer : held_->named_buffers()) {
    const auto prefix = named_ ? fsdp::unit_of_handle(unit_).name() + "." : "";
    add(canonical_name_ ? canonical_name_(buffer.key()) : prefix + buffer.key(), buffer.value());
  }
  return result;
}

std::vector<ShardView> ShardedBase::shards() const {
  std::vector<ShardView> result;
  for (const auto& own : all()) {
    const auto owned = own.parameter->owned();
    result.push_back({&own.parameter->contract, own.parameter->shard, owned.begin, owned.end,
                      own.parameter->coordinates, own.parameter->shared_from_this(),
                      own.parameter->place_in_model});
  }
  return result;
}

std::vector<BufferView> ShardedBase::buffers() const {
  std::vector<BufferView> result;
  for (const auto& buffer : fsdp::unit_of_handle(unit_).buffers) {
    const auto contract = std::make_shared<const BufferContract>(buffer.contract);
    result.push_back({contract.get(), buffer.tensor, buffer.stored(), contract});
  }
  for (const auto& inner : inner_) {
    for (auto& view : inner.handle->buffers()) result.push_back(std::move(view));
  }
  return result;
}

std::vector<std::string> ShardedBase::ignored_names() const {
  fsdp::unit_of_handle(unit_);
  auto names = ignored_;
  for (const auto& inner : inner_) {
    for (const auto& name : inner.handle->ignored_names()) {
      names.push_back(inner.handle->named_ ? name : inner.path + "." + name);
    }
  }
  return names;
}

ModelContract ShardedBase::contract() const {
  ModelContract model;
  for (const auto& own : all()) model.parameters.push_back(own.parameter->contract);
  // In the order of units: this one, then those inside as they were found.
  const std::function<void(const ShardedBase&)> add = [&](const ShardedBase& handle) {
    const fsdp::Unit& unit = fsdp::unit_of_handle(handle.unit_);
    for (const auto& buffer : unit.buffers) model.buffers.push_back(buffer.contract);
    model.units.push_back(unit.contract);
    for (const auto& inner : handle.inner_) add(*inner.handle);
  };
  add(*this);
  return model;
}

std::string ShardedBase::contract_table() const { return to_string(contract()); }

namespace {

/// Returns the bucket's gradients as they are on the shards now, with the user's changes: [slice],
/// final dtype.
at::Tensor gradient_slice(const fsdp::Unit& unit, std::size_t index) {
  const auto& bucket = *unit.buckets()[index];
  auto slice = at::zeros({bucket.plan().slice_numel()},
                         bucket.shard().options().dtype(to_scalar_type(bucket.plan().key.final)));
  for (const auto& parameter : unit.parameters()) {
    const auto& gradient = parameter->shard.grad();
    if (parameter->bucket != index || !gradient.defined() || gradient.numel() == 0) continue;
    slice
        .narrow(0, bucket.plan().offset_in_slice(parameter->placed(), bucket.rank()),
                gradient.numel())
        .copy_(gradient);
  }
  return slice;
}

}  // namespace

void ShardedBase::visit_full(
    bool gradients, const std::function<void(const std::string&, const at::Tensor&)>& visit) const {
  const at::NoGradGuard no_grad;
  fsdp::unit_of_handle(unit_);
  if (gradients) runtime_->require_reduced("whole gradients");
  const auto named = all();
  auto& runtime = *runtime_;
  // Units in agreed order, so that every rank gathers the same buckets one after the other.
  for (auto* unit : runtime.units()) {
    fsdp::check_integrity(*unit);
    for (std::size_t index = 0; index < unit->buckets().size(); ++index) {
      auto& bucket = *unit->buckets()[index];
      if (gradients && !bucket.trainable()) continue;
      const auto slice = gradients ? gradient_slice(*unit, index) : bucket.shard();
      const auto flat = fsdp::whole_of(runtime, *unit, bucket, slice, "whole");
      for (const auto& own : named) {
        if (own.parameter->unit != unit || own.parameter->bucket != index) continue;
        const auto& placed = own.parameter->placed();
        const auto local = flat.narrow(0, placed.offset, placed.numel);
        visit(own.parameter->contract.name, fsdp::whole_of(runtime, *own.parameter, local));
      }
    }
  }
}

void ShardedBase::visit_full_parameters(
    const std::function<void(const std::string&, const at::Tensor&)>& visit) const {
  visit_full(false, visit);
}

void ShardedBase::visit_full_gradients(
    const std::function<void(const std::string&, const at::Tensor&)>& visit) const {
  visit_full(true, visit);
}

void ShardedBase::set_loaded() const {
  for (auto* unit : fsdp::unit_of_handle(unit_).runtime().units()) {
    unit->set_has_values();
    unit->forget_cast();
    unit->cast_buffers();
  }
}

const Mesh& ShardedBase::mesh() const { return fsdp::unit_of_handle(unit_).runtime().mesh(); }

int ShardedBase::rank() const { return mesh().world()->rank(); }

comm::Group* ShardedBase::data_group() const {
  return fsdp::unit_of_handle(unit_).runtime().data_group();
}

comm::Group* ShardedBase::stages_group() const {
  return fsdp::unit_of_handle(unit_).runtime().groups().stages();
}

void ShardedBase::train(bool on) {
  fsdp::unit_of_handle(unit_);
  torch::nn::Module::train(on);
  held_->train(on);
}

void ShardedBase::zero_grad(bool set_to_none) {
  auto& runtime = fsdp::unit_of_handle(unit_).runtime();
  runtime.renew_after_failure();
  runtime.require_no_step("zero_grad");
  for (const auto& own : all()) {
    auto& grad = own.parameter->shard.mutable_grad();
    own.parameter->lost = false;
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad.reset();
    } else {
      grad.detach_();
      grad.zero_();
    }
  }
  runtime.forget_cleared();
}

namespace {

[[noreturn]] void refuse(const char* what) {
  throw Error(ErrorKind::kUsage,
              concat(what,
                     ": found a sharded module, expected a plain one; do it before "
                     "fully_shard (dtypes: PrecisionPolicy)"));
}

}  // namespace

void ShardedBase::to(torch::Device, torch::Dtype, bool) { refuse("to(device, dtype)"); }
void ShardedBase::to(torch::Dtype, bool) { refuse("to(dtype)"); }
void ShardedBase::to(torch::Device, bool) { refuse("to(device)"); }

std::shared_ptr<torch::nn::Module> ShardedBase::clone(const std::optional<torch::Device>&) const {
  refuse("clone()");
}

void ShardedBase::save(torch::serialize::OutputArchive&) const {
  throw Error(ErrorKind::kUsage,
              "torch::save: found a sharded module, of which each rank holds a part, expected a "
              "plain one; save the dict of state_dict(handle, StateDictKind::kFull), or a "
              "checkpoint by save_checkpoint(handle, optimizer, folder)");
}

void ShardedBase::load(torch::serialize::InputArchive&) {
  throw Error(ErrorKind::kUsage,
              "torch::load: found a sharded module, of which each rank holds a part, expected a "
              "plain one; load a dict by load_state_dict(handle, entries), or a checkpoint by "
              "load_checkpoint(handle, optimizer, folder)");
}

namespace {

/// Returns the handle's unit for the call `what`, which requires that no forward waits for its
/// backward: the forward has settled the collectives of that backward.
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
  fsdp::unit_of_handle(unit_).runtime().require_no_step("set_requires_gradient_sync");
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

/// Requires that the units to set own their parameters alone: ties and merge_below_bytes move
/// parameters to an outer unit, and a factor for a part of a unit's parameters is not intended.
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
      const bool waits = unit.progress().pending || unit.progress().unpublished ||
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
  unit.runtime().require_no_step("unshard");
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
  unit.runtime().require_no_step("reshard");
  unit.release();
}

}  // namespace tessera

namespace tessera::fsdp {
namespace {

const Parameter& parameter_at(const Unit& unit, std::size_t bucket, std::size_t place) {
  const auto found =
      std::find_if(unit.parameters().begin(), unit.parameters().end(), [&](const auto& parameter) {
        return parameter->bucket == bucket && parameter->place == place;
      });
  TESSERA_INVARIANT(found != unit.parameters().end(), "unit ", unit.name(), ", bucket ", bucket,
                    ": nothing at place ", place);
  return **found;
}

layout::PlannedUnit planned(const Unit& unit) {
  layout::PlannedUnit result{{unit.name(), {}}, {}};
  for (std::size_t b = 0; b < unit.buckets().size(); ++b) {
    auto plan = unit.buckets()[b]->plan();
    for (std::size_t place = 0; place < plan.parameters.size(); ++place) {
      const auto& contract = parameter_at(unit, b, place).contract;
      plan.parameters[place].parameter = result.items.size();
      result.items.push_back(plan_item(contract));
    }
    result.plan.buckets.push_back(std::move(plan));
  }
  return result;
}

}  // namespace

layout::ModelPlan plan_of(const ShardedBase& model) {
  auto& runtime = unit_of_handle(model.unit()).runtime();
  layout::ModelPlan plan{runtime.plan_options(), {}};
  for (const auto* unit : runtime.units()) plan.units.push_back(planned(*unit));
  return plan;
}

void renew_after_failure(const ShardedBase& model) {
  unit_of_handle(model.unit()).runtime().renew_after_failure();
}

void require_idle(const ShardedBase& model, const char* what) {
  unit_of_handle(model.unit()).runtime().require_idle(what);
}

void set_planner(const ShardedBase& model, Planner planner, RecomputeMode while_recording) {
  unit_of_handle(model.unit()).runtime().set_planner(std::move(planner), while_recording);
}

void set_planned_recompute(const ShardedBase& model, RecomputeMode mode) {
  for (const Unit* unit : unit_of_handle(model.unit()).runtime().units()) {
    const auto module = unit->recomputable.lock();
    if (module && !module->own_recompute()) module->set_recompute(mode);
  }
}

std::vector<RecomputeMode> followed_recompute(const ShardedBase& model) {
  return unit_of_handle(model.unit()).runtime().followed_recompute();
}

std::shared_ptr<const StepPlan> followed_plan(const ShardedBase& model) {
  return unit_of_handle(model.unit()).runtime().followed_plan();
}

void set_regions(const ShardedBase& model, std::shared_ptr<grad::Regions> regions) {
  unit_of_handle(model.unit()).runtime().set_regions(std::move(regions));
}

std::shared_ptr<grad::Regions> regions_of(const ShardedBase& model) {
  return unit_of_handle(model.unit()).runtime().regions();
}

std::string unit_of(const at::Tensor& parameter) {
  const auto leaf = find_leaf(parameter);
  const bool is_of_unit = leaf && leaf->owner != nullptr && leaf->owner->unit != nullptr;
  return is_of_unit ? leaf->owner->unit->shown_name() : "";
}

bool is_there_in_backward(const at::Tensor& parameter) {
  const auto leaf = find_leaf(parameter);
  const bool is_of_unit = leaf && leaf->owner != nullptr && leaf->owner->unit != nullptr;
  return !is_of_unit || leaf->owner->unit->controls.unshard_in_backward;
}

std::vector<PlanUnit> plan_units(const ShardedBase& model) {
  return unit_of_handle(model.unit()).runtime().plan_units();
}

std::string last_entered(const ShardedBase& model) {
  return unit_of_handle(model.unit()).runtime().last_entered();
}

void are_read(const ShardedBase& model, const comm::Event& end) {
  unit_of_handle(model.unit()).runtime().are_read(end);
}

void order_after_reads(const ShardedBase& model) {
  unit_of_handle(model.unit()).runtime().order_after_reads();
}

void require_steps_of(const ShardedBase& model, const Optimizer& optimizer, const char* what) {
  std::map<const GradContract*, ShardView> views;
  for (const auto& view : model.shards()) views.emplace(view.contract, view);
  for (const auto& state : optimizer.state()) {
    const auto view = views.find(state.view.contract);
    TESSERA_CHECK(view != views.end(), ErrorKind::kUsage, what, ": found an optimizer that steps ",
                  state.view.contract->name,
                  ", which is no parameter of this handle, expected one that was made for it or "
                  "for a handle inside it");
    TESSERA_CHECK(view->second.begin == state.view.begin && view->second.end == state.view.end,
                  ErrorKind::kUsage, what, ": found that set_trainable() has laid out ",
                  state.view.contract->name,
                  " again without this optimizer, expected it among those that follow; name it "
                  "there");
  }
}

}  // namespace tessera::fsdp
