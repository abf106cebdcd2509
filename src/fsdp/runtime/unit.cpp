#include "fsdp/runtime/unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/interrupt.h"
#include "comm/host_read.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/whole.h"
#include "grad/contract_key.h"
#include "grad/finite_copy.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Whether the tensor has values (Tessera's layers make parameters without data).
bool has_data(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

/// The memory that a parameter had before it was laid out, where other tensors share it.
struct SharedMemory {
  c10::Storage storage;
  std::string parameter;
};

/// Frees the memory. A later access through a tensor outside of the sharded module throws an error.
void release_memory(const std::vector<SharedMemory>& all) {
  for (const auto& [storage, name] : all) {
    auto* impl = storage.unsafeGetStorageImpl();
    const auto records = std::ranges::count_if(all, [&](const SharedMemory& other) {
      return other.storage.unsafeGetStorageImpl() == impl;
    });
    if (storage.use_count() == static_cast<std::size_t>(records)) continue;
    impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
        concat("parameter ", name,
               ": found an access through a tensor that shared its storage, expected none after "
               "fully_shard; clone values before sharding, and shard tied parameters in one call"));
  }
}

}  // namespace

at::Tensor Buffer::stored() const {
  const auto& [exact, made] = *last_cast;
  const auto bytes = [](const at::Tensor& of) { return of.reshape({-1}).view(at::kByte); };
  const auto is_equal = [&](const at::Tensor& one, const at::Tensor& other) {
    if (one.is_cpu()) return at::equal(bytes(one), bytes(other));
    const auto differs = bytes(one).ne(bytes(other)).any();
    return !comm::read_on_host(differs, contract.name).item<bool>();
  };
  // Compares by value: the statistics of a batch norm are written past version counters.
  const bool is_as_made =
      exact.defined() && tensor.is_alias_of(made) && tensor.scalar_type() == made.scalar_type() &&
      tensor.sizes() == exact.sizes() && is_equal(tensor.detach(), exact.to(made.scalar_type()));
  return is_as_made ? exact : tensor.detach().to(to_scalar_type(contract.storage));
}

void Buffer::move_to(at::Device device) const {
  if (tensor.device() == device || tensor.is_meta()) return;
  tensor.set_data(tensor.detach().to(device));
}

void Buffer::cast() {
  const auto found = tensor.scalar_type();
  const auto wanted = to_scalar_type(contract.compute);
  if (found == wanted) return;
  TESSERA_CHECK(found == to_scalar_type(contract.storage), ErrorKind::kUsage, "buffer ",
                contract.name, ": found dtype ", c10::toString(found), ", expected ",
                to_string(contract.storage), " or ", to_string(contract.compute),
                "; change dtypes before fully_shard, or by PrecisionPolicy");
  const auto before = tensor.detach();
  const auto after = at::empty(tensor.sizes(), tensor.options().dtype(wanted));
  grad::finite_copy(after.view({-1}), before.reshape({-1}), "buffer " + contract.name);
  tensor.set_data(after);  // the object that the module holds stays
  // Clones the values, since other holders of the memory may write to it.
  const bool narrows = !represents(contract.compute, contract.storage);
  *last_cast = {narrows ? before.clone() : at::Tensor(), after};
}

layout::Range Parameter::owned() const {
  const auto& home = unit->bucket_of(*this);
  return home.plan().owned(placed(), home.rank());
}

const layout::Placed& Parameter::placed() const {
  return unit->bucket_of(*this).plan().parameters[place];
}

Unit::Unit(std::string name, std::shared_ptr<Runtime> runtime, bool reshard)
    : runtime_(std::move(runtime)) {
  controls.reshard_after_forward = reshard;
  contract.name = std::move(name);
}

Unit::~Unit() {
  const base::NoInterrupts until_it_is_gone;
  runtime_->remove_unit(this);
  if (!device().is_cpu()) end_gather();
  for (const auto& parameter : parameters_) {
    for (const auto& leaf : parameter->leaves) {
      if (leaf->sink == &runtime_->sink()) runtime_->sink().remove(leaf->slot);
    }
    parameter->leave_unit();
  }
}

/// Ends a gather under way before the unit is destroyed: on a device, kernels may still use the
/// memory.
void Unit::end_gather() {
  try {
    for (auto& one : pending_) one.wait();
  } catch (const std::exception&) {
    // The run has failed; gathers under way are lost.
  }
  try {
    abandon_gather();
  } catch (const std::exception&) {
    // The device no longer answers; its memory is lost.
  }
}

void Parameter::leave_unit() {
  unit = nullptr;
  for (const auto& leaf : leaves) {
    // The module may outlive the parameter. Its tensors then keep the leaf, through their hook, and
    // nothing else keeps it.
    leaf->owner = nullptr;
    leaf->contract = nullptr;
    leaf->sink = nullptr;
    leaf->tensor = at::Tensor();
  }
  leaves.clear();
}

std::string Unit::released_message() const {
  return concat(
      "parameters of unit ", shown_name(),
      ": found an access while they are sharded, expected one inside a forward or backward of "
      "the unit; call what fully_shard returned",
      controls.unshard_in_backward
          ? ""
          : ", and set_unshard_in_backward(true) if its backward reads them");
}

void Unit::set_unshard_in_backward(bool value) {
  controls.unshard_in_backward = value;
  for (auto& bucket : buckets_) bucket->unsharded().set_released_message(released_message());
}

void Unit::set_divide_factor(double factor) {
  controls.divide_factor = factor;
  // Includes frozen parameters, which may be trained later (set_trainable).
  for (auto& parameter : parameters_) parameter->contract.reductions.divide_factor = factor;
  for (auto& bucket : buckets_) bucket->set_divide_factor(factor);
}

void Unit::add_prefix(const std::string& prefix) {
  contract.name = contract.name.empty() ? prefix : prefix + "." + contract.name;
  for (auto& parameter : parameters_) {
    parameter->contract.name = prefix + "." + parameter->contract.name;
    for (auto& alias : parameter->contract.aliases) alias = prefix + "." + alias;
  }
  for (auto& buffer : buffers)
    buffer.contract.name = buffer.meta.name = prefix + "." + buffer.meta.name;
  for (auto& each : registered) {
    if (!each.name.empty()) each.name = prefix + "." + each.name;
  }
  for (auto& bucket : buckets_) bucket->unsharded().set_released_message(released_message());
}

bool Unit::trainable() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const auto& b) { return b->trainable(); });
}

bool Unit::always_unsharded() const {
  return std::all_of(buckets_.begin(), buckets_.end(),
                     [](const auto& b) { return b->aliases_shard(); });
}

void Unit::add(std::vector<std::shared_ptr<Parameter>> added) {
  if (!added.empty()) build(std::move(added));
  auto& sink = runtime_->sink();
  for (const auto& parameter : parameters_) {
    auto& bucket = bucket_of(*parameter);
    bucket.set_parameter(parameter->place, *parameter);
    for (auto& leaf : parameter->leaves) {
      if (leaf->sink != &sink) {
        leaf->sink = &sink;
        leaf->slot = sink.add(&parameter->contract, &bucket, parameter->place);
      } else {
        sink.update(leaf->slot, &parameter->contract, &bucket, parameter->place);
      }
    }
  }
}

std::unique_ptr<Bucket> Unit::make_bucket(const layout::BucketPlan& plan) {
  // A bucket that is whole on every rank takes part in no collective.
  const AxesGroups on = plan.key.replicated ? AxesGroups() : runtime_->groups().of(plan.key);
  return std::make_unique<Bucket>(*this, plan, on.groups, on.rank);
}

void Unit::build(std::vector<std::shared_ptr<Parameter>> added) {
  const at::NoGradGuard no_grad;
  std::vector<layout::PlanItem> items;
  for (const auto& p : added) {
    items.push_back(plan_item(p->contract));
  }
  const auto options = runtime_->plan_options();
  const auto plan = layout::plan_unit(name(), items, options);
  layout::validate(plan, items, options);
  // Parameters may be views of one storage, which is read until the last of them has moved. A
  // storage of one parameter alone is freed at once.
  std::vector<SharedMemory> old_memory;
  for (const auto& bucket_plan : plan.buckets) {
    auto bucket = make_bucket(bucket_plan);
    for (std::size_t place = 0; place < bucket_plan.parameters.size(); ++place) {
      const auto& placed = bucket_plan.parameters[place];
      auto& parameter = *added[placed.parameter];
      const auto shard = bucket->shard_of(placed);
      if (const auto& first = parameter.leaves.front()->tensor; has_data(first)) {
        const auto owned = bucket_plan.owned(placed, bucket->rank());
        grad::load_values(shard, first.detach().reshape(-1).narrow(0, owned.begin, owned.size()),
                          parameter.contract);
      } else {
        has_values_ = false;
      }
      if (parameter.shard.defined()) {
        parameter.shard.set_data(shard);
      } else {
        // It has a separate version counter: a bucket's shards are views of one memory.
        parameter.shard = shard.variable_data();
        parameter.shard.set_requires_grad(parameter.contract.trainable);
      }
      parameter.unit = this;
      parameter.coordinates = runtime_->mesh().coordinates(parameter.contract.layout);
      parameter.bucket = buckets_.size();
      parameter.place = place;
      for (auto& leaf : parameter.leaves) {
        const auto old = leaf->tensor.storage();
        if (parameter.contract.trainable) leaf->tensor.set_grad_dtype(std::nullopt);
        leaf->tensor.set_data(bucket->unsharded().view(placed.offset, leaf->tensor.sizes()));
        if (find_leaf(leaf->tensor) == nullptr) grad::install(leaf, parameter.contract.trainable);
        leaf->owner = &parameter;
        leaf->contract = &parameter.contract;
        if (leaf != parameter.leaves.back() || !old || old.nbytes() == 0) continue;
        if (old.use_count() > 1) old_memory.push_back({old, parameter.contract.name});
      }
    }
    bucket->set_number(buckets_.size());
    buckets_.push_back(std::move(bucket));
  }
  release_memory(old_memory);
  for (auto& p : added) parameters_.push_back(std::move(p));
}

std::vector<std::shared_ptr<Parameter>> Unit::take_bucket(std::size_t index) {
  const at::NoGradGuard no_grad;
  auto& bucket = *buckets_.at(index);
  TESSERA_CHECK(!gathered_ && !gather_pending() && expected() == 0, ErrorKind::kUsage, "unit ",
                shown_name(),
                ": found a forward under way, expected none while modules are sharded");
  const auto flat = has_values_
                        ? whole_of(*runtime_, *this, bucket, bucket.shard(), "laid out again")
                        : bucket.shard();
  std::vector<std::shared_ptr<Parameter>> taken;
  for (auto& parameter : parameters_) {
    if (parameter->bucket != index) {
      if (parameter->bucket > index) --parameter->bucket;
      continue;
    }
    const auto placed = bucket.plan().parameters[parameter->place];
    for (auto& leaf : parameter->leaves) {
      runtime_->sink().remove(leaf->slot);  // until another unit takes the parameter
      // Restores the values in the storage dtype; several leaves of one parameter share them.
      auto values = has_values_ ? flat.narrow(0, placed.offset, placed.numel).clone()
                                : at::empty({0}, flat.options());
      if (!has_values_) values.unsafeGetTensorImpl()->set_sizes_contiguous(leaf->tensor.sizes());
      leaf->tensor.set_data(has_values_ ? values.view(leaf->tensor.sizes()) : values);
    }
    taken.push_back(std::move(parameter));
  }
  std::erase(parameters_, nullptr);
  buckets_.erase(buckets_.begin() + static_cast<std::ptrdiff_t>(index));
  for (std::size_t i = index; i < buckets_.size(); ++i) buckets_[i]->set_number(i);
  return taken;
}

void Unit::join(const std::shared_ptr<Runtime>& runtime) {
  runtime_ = runtime;
  for (auto& bucket : buckets_) bucket->use_pool(runtime->pool());
  add({});
}

void Unit::cast_buffers() {
  if (buffers_are_cast_) return;
  const at::NoGradGuard no_grad;
  for (auto& buffer : buffers) buffer.cast();
  buffers_are_cast_ = true;
}

void Unit::renew_accumulators() {
  for (const auto& parameter : parameters_) {
    if (!parameter->contract.trainable) continue;
    for (const auto& leaf : parameter->leaves) grad::renew_accumulator(*leaf);
  }
  renew_shared();
}

void Unit::renew_shared() {
  for (const auto& leaf : owned_elsewhere) {
    if (leaf->owner->contract.trainable) grad::renew_accumulator(*leaf);
  }
}

std::uint64_t Unit::weights_version() const {
  std::uint64_t version = 0;
  for (const auto& parameter : parameters_) {
    version += static_cast<std::uint64_t>(parameter->shard._version());
  }
  return version;
}

void Unit::mark_stale(const at::Tensor& mark) {
  if (device() != at::kCPU && gather_pending()) wait_gather();  // it writes this rank's slice, too
  if (!gathered_ && !gather_pending()) return;
  read_here();
  for (const auto& bucket : buckets_) bucket->mark_stale(mark);
}

at::Device Unit::device() const { return runtime_->device(); }

void Unit::begin_gather(std::uint32_t micro_batch) {
  if (gather_pending()) wait_gather();
  if (!gathered_) {
    readers_.clear();
    readers_.note(comm::Stream::current(device()));
  }
  for_groups(&BucketGroups::gather, [&](comm::Group* group) { begin_gather(group, micro_batch); });
  // On a device, kernels may read the memory during a second gather, so this stream waits for it.
  if (pending_.empty() || (gathered_ && device() != at::kCPU)) wait_gather();
}

void Unit::begin_gather(comm::Group* group, std::uint32_t micro_batch) {
  comm::Batch batch;
  batch.label = {comm::Kind::kAllGather, shown_name(), id(), micro_batch, runtime_->marks()};
  std::vector<Bucket*> begun;
  for (auto& bucket : buckets_) {
    if (bucket->groups().gather != group) continue;
    if (gathered_) {
      if (group != nullptr) batch.ops.emplace_back(bucket->gather());
    } else {
      bucket->begin_gather(batch);
      begun.push_back(bucket.get());
    }
  }
  const auto fill = [&] {
    for (const auto* bucket : begun) bucket->fill_gather();
  };
  if (batch.ops.empty()) {
    fill();
    return;
  }
  if (const auto& stream = group->stream()) {
    // Where the unit is gathered already, the stream is ordered after all that read the memory.
    gathered_ ? readers_.join(stream, comm::EventSite::kGather) : readers_.note(stream);
  }
  pending_.push_back(submit(runtime_->queue(), *group, std::move(batch), [&] {
    fill();
    if (group->stream()) {
      filled_.emplace_back().record(group->stream(), comm::EventSite::kGather);
    }
  }));
}

void Unit::wait_gather() {
  for (auto& one : pending_) one.wait();
  pending_.clear();
  filled_.clear();
  const auto here = comm::Stream::current(device());
  readers_.enter(here, comm::EventSite::kGather);  // after what the rank's stream has written
  readers_.clear();
  readers_.note(here);
  if (gathered_) return;
  for (auto& bucket : buckets_) {
    if (!bucket->aliases_shard()) bucket->unsharded().publish();
  }
  gathered_ = true;
  note_versions(*this);
}

void Unit::leave_shards() const {
  for (const auto& one : filled_) {
    one.block(comm::Stream::current(device()), comm::EventSite::kGather);
  }
}

void Unit::release() {
  if (gather_pending()) wait_gather();
  if (!gathered_) return;
  free_memory();
  require_unwritten(*this);
}

void Unit::free_memory() {
  readers_.join(comm::Stream::current(device()), comm::EventSite::kGather);
  readers_.clear();
  for (auto& bucket : buckets_) bucket->unsharded().end();
  gathered_ = progress_.unsharded_by_user = progress_.gathered_again = false;
}

void Unit::abandon_gather() {
  pending_.clear();
  filled_.clear();
  free_memory();
}

void Unit::tickets_changed(int delta) {
  progress_.tickets += delta;
  if (progress_.tickets == 0) runtime_->on_tickets_closed();
}

Unit& unit_of_handle(const std::shared_ptr<Unit>& unit) {
  TESSERA_CHECK(unit != nullptr, ErrorKind::kUsage,
                "sharded module: found a handle that was moved from, expected the one that holds "
                "the module now");
  return *unit;
}

}  // namespace tessera::fsdp
