// fully_shard: the steps in which a module becomes a unit, in their order.
#include <ATen/ATen.h>

#include <algorithm>

#include "fsdp/collect.h"
#include "fsdp/contracts.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/resolve_steps.h"
#include "tessera/error.h"
#include "tessera/recompute_mode.h"
#include "tessera/shard.h"

namespace tessera {
namespace {

/// Replaces dots, which torch's registries refuse in names.
std::string escaped(std::string name) {
  std::replace(name.begin(), name.end(), '.', '/');
  return name;
}

void require_sizes(const ShardOptions& options) {
  const auto require = [](const char* name, std::int64_t bytes) {
    TESSERA_CHECK(bytes >= 0, ErrorKind::kUsage, "fully_shard: found ", name, " ", bytes,
                  ", expected a number of bytes, 0 or more");
  };
  require("merge_below_bytes", options.merge_below_bytes);
  require("in_flight_bytes", options.in_flight_bytes.value_or(0));
}

/// Requires values on the host or on the World's device. The message names the rank, since another
/// device is the mistake of one rank.
void require_devices(const std::vector<fsdp::FoundParameter>& parameters, at::Device device) {
  for (const auto& parameter : parameters) {
    const at::Tensor& tensor = parameter.leaves.front()->tensor;
    TESSERA_CHECK(tensor.is_cpu() || tensor.device() == device, ErrorKind::kUsage, "parameter ",
                  parameter.meta.name, ": found it on ", tensor.device().str(), ", expected ",
                  device.str(), device.is_cpu() ? "" : " or cpu", ", as its World computes on ",
                  device.str(), "; make the module there, or move it before fully_shard");
  }
}

}  // namespace

ShardedBase::~ShardedBase() = default;

ShardedBase::ShardedBase(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
                         const PrecisionPolicy& policy, const ShardOptions& options)
    : torch::nn::Module("Sharded"),
      held_(std::move(module)),
      policy_(policy),
      canonical_name_(options.canonical_name),
      asked_output_(options.output_dtype),
      asked_reshard_(options.reshard_after_forward.has_value()),
      named_(!options.name.empty()) {
  TESSERA_CHECK(held_ != nullptr, ErrorKind::kUsage, "fully_shard: found no module, expected one");
  TESSERA_CHECK(mesh.world() != nullptr, ErrorKind::kUsage,
                "fully_shard: found a mesh without a world, expected one of World::mesh()");
  TESSERA_CHECK(!mesh.world()->closed(), ErrorKind::kUsage,
                "fully_shard: found a World that is closed, expected one that is open; close it "
                "behind the last step");
  TESSERA_CHECK(std::dynamic_pointer_cast<ShardedBase>(held_) == nullptr, ErrorKind::kUsage,
                "fully_shard: found a module that is sharded already, expected a plain one");
  auto found = fsdp::collect(*held_, options);
  for (const auto& path : found.ignored) {
    ignored_.push_back(named_ ? fsdp::prefix_of(path, options) : path);
  }
  for (const auto& inner : found.handles) {
    const auto& other = inner.handle->runtime_->mesh();
    TESSERA_CHECK(other.world() == mesh.world() && other.shapes() == mesh.shapes(),
                  ErrorKind::kUsage, "fully_shard: found ", inner.path, " sharded over the mesh ",
                  to_string(other.shapes()),
                  other.world() == mesh.world() ? "" : " of another world",
                  ", expected that of the module around it, ", to_string(mesh.shapes()),
                  "; shard a module and its parts over one mesh");
  }
  for (const auto& inner : found.handles) {
    TESSERA_CHECK(!inner.handle->is_inside_, ErrorKind::kUsage, "fully_shard: found the handle of ",
                  inner.path,
                  ", which a fully_shard around it has taken in before, expected one "
                  "that nothing has; shard a module once, or make it again");
  }
  for (const auto& leaf : found.owned_by_others) {
    TESSERA_CHECK(leaf->owner->unit->module != held_.get(), ErrorKind::kUsage,
                  "fully_shard: found the parameter ", leaf->owner->contract.name,
                  " of a module that another handle has sharded, expected a plain module; use that "
                  "handle, or make the module again");
  }
  require_sizes(options);
  require_devices(found.parameters, mesh.world()->device());
  std::vector<std::string> patterns_inside;
  const std::function<void(const ShardedBase&)> see = [&](const ShardedBase& handle) {
    for (const auto& rule : handle.policy_.rules) {
      patterns_inside.insert(patterns_inside.end(), rule.match.begin(), rule.match.end());
    }
    for (const auto& inner : handle.inner_) see(*inner.handle);
  };
  for (const auto& inner : found.handles) see(*inner.handle);
  const auto contracts = fsdp::contracts_of(found, mesh, policy, options, patterns_inside);
  runtime_ = std::make_shared<fsdp::Runtime>(mesh, options.in_flight_bytes);
  if (mesh.shapes().has_model_axes()) {
    // The placements decide which groups are made.
    runtime_->agree(to_lines(contracts), "contracts",
                    "let the layers declare the same on every rank");
  }
  require_handles_between_steps(found.handles);
  unit_ = std::make_shared<fsdp::Unit>(options.name, runtime_,
                                       options.reshard_after_forward.value_or(false));
  unit_->module = held_.get();
  if (found.handles.empty()) {
    unit_->recomputable = std::dynamic_pointer_cast<Recomputable>(held_);
  }
  end_ = std::shared_ptr<void>(unit_.get(),
                               [unit = unit_](void*) { unit->runtime().handle_is_gone(*unit); });
  runtime_->add_unit(unit_.get());
  unit_->registered = fsdp::registered_of(found, options);
  unit_->buffers = fsdp::make_buffers(found.buffers, contracts.buffers, options);
  for (const auto& buffer : unit_->buffers) buffer.move_to(runtime_->device());
  unit_->add(fsdp::make_parameters(found.parameters, contracts.parameters, options));
  for (const auto& parameter : unit_->parameters()) {
    const auto& name = parameter->leaves.front()->name;
    own_.push_back({named_ ? parameter->contract.name : name, parameter.get()});
    register_parameter(escaped(name), parameter->shard, parameter->contract.trainable);
  }
  if (const auto given = fsdp::given_unit_contract(options)) {
    unit_->contract = *given;
    unit_is_given_ = true;
  }
  resolve_unit(Place::kOutermost);
  for (const auto& inner : found.handles) inner_.push_back({inner.path, inner.handle});
  unit_->owned_elsewhere = found.owned_by_others;
  runtime_->agree_on_plan();  // before any collective that moves parameters
  runtime_->name_model();
  adopt(options);
  resolve_buffers();
  for (const auto& inner : inner_) register_module(escaped(inner.path), inner.handle);
}

/// Inner units get other numbers, and their parameters may move: an earlier backward would find
/// other ones in their places. Whether one is pending is local to a rank, so all ranks refuse
/// together. Nothing has changed at that point.
void ShardedBase::require_handles_between_steps(const std::vector<fsdp::FoundHandle>& handles) {
  if (handles.empty()) return;
  std::string found;
  for (const auto& inner : handles) {
    try {
      const auto what = concat("fully_shard around ", inner.path);
      inner.handle->runtime_->require_between_steps(what.c_str());
      inner.handle->runtime_->require_not_compiled(what);
    } catch (const Error& error) {
      if (found.empty()) found = error.what();
    }
  }
  bool anywhere = !found.empty();
  if (auto* group = runtime_->data_group(); group != nullptr) {
    anywhere = comm::any_of_ranks(*group, {anywhere}, "modules between steps")[0];
  }
  if (!anywhere) return;
  throw Error(ErrorKind::kUsage,
              found.empty() ? "fully_shard: found that another rank refused it, expected all to "
                              "shard between steps; that rank says why"
                            : found);
}

void ShardedBase::resolve_unit(Place place) {
  if (unit_is_given_) return;
  UnitMeta meta;
  meta.name = unit_->name();
  meta.nested = place == Place::kInside;
  meta.asked_output = asked_output_;
  std::vector<GradContract> contracts;
  for (const auto& own : own_) {
    meta.parameters.push_back(contracts.size());
    contracts.push_back(own.parameter->contract);
  }
  unit_->contract = grad::resolve_unit(meta, contracts, policy_);
}

void ShardedBase::resolve_buffers() {
  std::vector<GradContract> parameters;
  for (const auto& own : all()) parameters.push_back(own.parameter->contract);
  const std::function<void(ShardedBase&)> resolve = [&](ShardedBase& handle) {
    grad::RuleBook rules(handle.policy_.rules);
    for (auto& buffer : handle.unit_->buffers) {
      // A buffer that was cast stays so: its digits are lost.
      if (buffer.given || handle.unit_->buffers_are_cast()) continue;
      buffer.contract = grad::resolve_buffer(buffer.meta, rules.ask(buffer.meta.name), parameters,
                                             handle.policy_);
    }
    for (const auto& inner : handle.inner_) resolve(*inner.handle);
  };
  resolve(*this);
  fsdp::check_shared_buffers(runtime_->units());
}

/// Moves the inner units to this runtime, and shared parameters to their owner. [Note: shared
/// across units]: a parameter that several units use belongs to their lowest common ancestor, found
/// by tensor identity.
void ShardedBase::adopt(const ShardOptions& options) {
  std::vector<fsdp::Unit*> below;
  for (const auto& inner : inner_) {
    const auto units = inner.handle->runtime_->units();
    for (auto* unit : units) {
      inner.handle->runtime_->remove_unit(unit);
      runtime_->add_unit(unit);
      if (unit == inner.handle->unit_.get() && !inner.handle->asked_reshard_)
        unit->controls.reshard_after_forward = true;
      if (!inner.handle->named_) unit->add_prefix(fsdp::prefix_of(inner.path, options));
      below.push_back(unit);
    }
    inner.handle->set_runtime(runtime_);
    inner.handle->is_inside_ = true;
    inner.handle->resolve_unit(Place::kInside);
  }
  for (auto* unit : below) unit->join(runtime_);
  fsdp::move_shared(*unit_, below);
  fsdp::move_small(*unit_, below, options.merge_below_bytes);
  runtime_->controls_changed();
}

void ShardedBase::set_runtime(const std::shared_ptr<fsdp::Runtime>& runtime) {
  runtime_ = runtime;
  for (const auto& inner : inner_) inner.handle->set_runtime(runtime);
}

}  // namespace tessera
