#include "capture/replay/live_entry.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "base/threads/product.h"
#include "kernels/results.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

/// Returns a storage of that size that has no memory yet.
c10::Storage nowhere(std::int64_t size) {
  return {c10::Storage::use_byte_size_t(), static_cast<std::size_t>(size),
          at::DataPtr(nullptr, at::kCPU), nullptr, /*resizable=*/false};
}

/// Like at::empty_strided, for that value.
at::Tensor fresh_of(const Value& value) {
  return at::empty_strided(value.sizes, value.strides, at::TensorOptions().dtype(value.dtype));
}

/// Copies with the strides of `tensor`: later operations may add in their order.
at::Tensor copy_of(const at::Tensor& tensor) {
  std::int64_t reach = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return tensor.clone();
    reach += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const at::Tensor memory = tensor.as_strided({reach}, {1}, tensor.storage_offset()).clone();
  return memory.as_strided(tensor.sizes(), tensor.strides());
}

void run_boxed(const ProgramCall& call, c10::Stack& stack) {
  const base::OneThread one(call.on_one_thread);
  call.operation.callBoxed(stack);
}

/// Returns where its memory begins.
void* begin_of(const at::Tensor& tensor) { return tensor.storage().mutable_data(); }

/// Returns the tensors that the tape has values of: one that an operation leaves out is none.
std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> results) {
  std::vector<at::Tensor> all;
  for (const auto& result : results) {
    if (result.isTensor()) {
      if (is_value(result.toTensor())) all.push_back(result.toTensor());
    } else if (result.isTensorList()) {
      for (const at::Tensor& each : result.toTensorVector()) all.push_back(each);
    }
  }
  return all;
}

/// Holds the lease during one backward, however it ends.
class Lease {
 public:
  Lease(std::shared_ptr<const LiveEntry>& place, std::shared_ptr<const LiveEntry> lease)
      : place_(place) {
    place_ = std::move(lease);
  }
  ~Lease() { place_.reset(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  std::shared_ptr<const LiveEntry>& place_;
};

/// Puts results into their places; those that lie there already stay.
void put(std::vector<at::Tensor> results, const std::vector<at::Tensor>& places) {
  const auto lies_in = [&](const at::Tensor& result, const at::Tensor& place) {
    return place.defined() && result.defined() && result.is_alias_of(place);
  };
  for (std::size_t i = 0; i < places.size(); ++i) {
    for (std::size_t j = 0; j < places.size(); ++j) {
      // It lies in the place of another one, which would overwrite it.
      if (i != j && lies_in(results.at(i), places[j])) results[i] = results[i].clone();
    }
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!places[i].defined()) continue;
    const bool is_there = results[i].is_alias_of(places[i]) &&
                          results[i].const_data_ptr() == places[i].const_data_ptr();
    if (!is_there) places[i].copy_(results[i]);
  }
}

}  // namespace

LiveEntry::LiveEntry(std::shared_ptr<const Program> program, std::shared_ptr<Blocks> blocks,
                     std::string unit)
    : program_(std::move(program)), blocks_(std::move(blocks)), unit_(std::move(unit)) {
  const at::NoGradGuard no_grad;
  for (const auto& memory : program_->memories) storages_.push_back(nowhere(memory.bytes));
  for (std::size_t i = 0; i < program_->values.size(); ++i) {
    const auto memory = static_cast<std::size_t>(program_->values[i].memory);
    values_.push_back(tensor_of(storages_[memory], program_->values[i]));
    if (program_->memories[memory].outside) outside_.push_back(i);
  }
  for (const auto& step : program_->steps) {
    stacks_.push_back(step.call ? stack_of(*step.call) : c10::Stack());
    made_.emplace_back();
    given_.emplace_back();
    if (!step.call) continue;
    for (const ValueId id : step.call->made) {
      made_.back().push_back(id == kNone ? at::Tensor() : value(id));
      const bool takes = step.call->form == ProgramCall::Form::kResults && id != kNone;
      if (takes) given_.back().push_back(value(id));
    }
  }
}

c10::Stack LiveEntry::stack_of(const ProgramCall& call) const {
  const auto tensor = [&](ValueId id) { return id == kNone ? at::Tensor() : value(id); };
  c10::Stack stack;
  for (const auto& slot : call.arguments) {
    switch (slot.form) {
      case Slot::Form::kConstant:
        stack.push_back(slot.constant);
        break;
      case Slot::Form::kTensor:
        stack.emplace_back(tensor(slot.values.at(0)));
        break;
      case Slot::Form::kTensors: {
        c10::List<at::Tensor> list;
        for (const ValueId id : slot.values) list.push_back(tensor(id));
        stack.emplace_back(std::move(list));
        break;
      }
      case Slot::Form::kOptionalTensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const ValueId id : slot.values) {
          list.push_back(id == kNone ? std::nullopt : std::optional(tensor(id)));
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }
  return stack;
}

void LiveEntry::point(MemoryId memory, void* data) {
  auto* storage = storages_[static_cast<std::size_t>(memory)].unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(data, at::kCPU));
}

void LiveEntry::use(MemoryPlace place, char* block, char*& last) {
  if (std::exchange(last, block) == block) return;
  for (std::size_t i = 0; i < program_->memories.size(); ++i) {
    const auto& memory = program_->memories[i];
    if (memory.place == place) point(static_cast<MemoryId>(i), block + memory.offset);
  }
}

Block LiveEntry::scratch() const {
  return {blocks_, unit_, BlockKind::kScratch, program_->scratch_bytes};
}

/// Holds the memory from outside until release(), as autograd holds what it saves. At other times
/// only its owners hold it, so that an expired reference means that it is no longer in use
/// (outside.h).
void LiveEntry::find_outside() {
  for (const auto i : outside_) {
    const auto memory = static_cast<std::size_t>(program_->values[i].memory);
    auto held = program_->memories[memory].outside->lock();
    TESSERA_INVARIANT(held, "memory from outside of a region that has no owner");
    values_[i].unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(held)));
  }
}

void LiveEntry::give(const std::vector<ValueId>& ids, const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == kNone) continue;
    const MemoryId id = program_->values[static_cast<std::size_t>(ids[i])].memory;
    const auto& memory = program_->memories[static_cast<std::size_t>(id)];
    held_.push_back(tensors.at(i).storage());
    auto* first = static_cast<char*>(const_cast<void*>(tensors[i].const_data_ptr()));
    point(id, first - memory.first_byte);
  }
}

std::vector<at::Tensor> LiveEntry::hand_out(const std::vector<HandedValue>& handed) {
  std::vector<at::Tensor> fresh;
  for (const auto& one : handed) {
    fresh.emplace_back();
    if (!one.is_fresh) continue;
    const auto& value = program_->values[static_cast<std::size_t>(one.value)];
    fresh.back() = fresh_of(value);
    point(value.memory, begin_of(fresh.back()));
  }
  return fresh;
}

std::vector<at::Tensor> LiveEntry::handed(const std::vector<HandedValue>& handed,
                                          const std::vector<at::Tensor>& fresh,
                                          const std::vector<at::Tensor>& given) const {
  std::vector<at::Tensor> results = fresh;
  for (std::size_t i = 0; i < handed.size(); ++i) {
    const auto& one = handed[i];
    if (one.value == kNone || one.is_fresh) continue;
    const auto& value = program_->values[static_cast<std::size_t>(one.value)];
    if (one.given != kNone) {
      const at::Tensor& whole = given.at(static_cast<std::size_t>(one.given));
      const auto& memory = program_->memories[static_cast<std::size_t>(value.memory)];
      const auto size = static_cast<std::int64_t>(c10::elementSize(value.dtype));
      const std::int64_t offset = whole.storage_offset() + value.offset - memory.first_byte / size;
      results[i] = whole.as_strided(value.sizes, value.strides, offset);
    } else if (one.same_as != kNone) {
      const at::Tensor& whole = fresh[static_cast<std::size_t>(one.same_as)];
      results[i] = whole.as_strided(value.sizes, value.strides, value.offset);
      // A change of one is a change of the other.
      results[i].unsafeGetTensorImpl()->set_version_counter(
          whole.unsafeGetTensorImpl()->version_counter());
    } else {
      results[i] = copy_of(this->value(one.value));
    }
  }
  return results;
}

std::vector<at::Tensor> LiveEntry::forward(const std::vector<at::Tensor>& inputs,
                                           const StepSeen& seen) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  held_.clear();
  if (!block_) block_.emplace(blocks_, unit_, BlockKind::kEntry, program_->entry_bytes);
  use(MemoryPlace::kEntry, block_->data(), last_block_);
  const Block of_run = scratch();
  use(MemoryPlace::kScratch, of_run.data(), last_scratch_);
  find_outside();
  give(program_->inputs, inputs);
  const auto fresh = hand_out(program_->results);
  run(0, program_->forward_steps, Gradients::kLeft, seen);
  for (const auto i : program_->kept_results) {
    held_.push_back(fresh[static_cast<std::size_t>(i)].storage());
  }
  return handed(program_->results, fresh, inputs);
}

std::vector<at::Tensor> LiveEntry::backward(const std::vector<at::Tensor>& gradients,
                                            Gradients of_parameters, const StepSeen& seen,
                                            const std::shared_ptr<const LiveEntry>& lease) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  const Block of_run = scratch();
  use(MemoryPlace::kScratch, of_run.data(), last_scratch_);
  give(program_->gradients, gradients);
  const auto fresh = hand_out(program_->input_gradients);
  // A deferred product may read one of them later: autograd neither frees nor adds to it.
  for (const auto& gradient : fresh) {
    if (program_->defers && gradient.defined()) held_.push_back(gradient.storage());
  }
  accepted_.assign(program_->steps.size(), false);
  const Lease held(lease_, lease);
  run(program_->forward_steps, program_->steps.size(), of_parameters, seen);
  return handed(program_->input_gradients, fresh, gradients);
}

void LiveEntry::release() {
  for (const auto i : outside_) {
    const auto memory = static_cast<std::size_t>(program_->values[i].memory);
    values_[i].unsafeGetTensorImpl()->set_storage_keep_dtype(storages_[memory]);
  }
  held_.clear();
  block_.reset();
}

void LiveEntry::run(std::size_t begin, std::size_t end, Gradients of_parameters,
                    const StepSeen& seen) {
  for (std::size_t i = begin; i < end; ++i) {
    const auto& step = program_->steps[i];
    if (step.call) {
      run_call(i, of_parameters);
      stack_.clear();
      if (seen) seen(i);
    } else if (of_parameters == Gradients::kLeft) {
      if (seen) seen(i);
    } else if (!accepted_[i]) {
      accept(step.gradient);
    }
  }
}

void LiveEntry::run_call(std::size_t step, Gradients of_parameters) {
  const auto& call = *program_->steps[step].call;
  if (call.form == ProgramCall::Form::kNothing) return;
  if (call.direct && of_parameters == Gradients::kAccepted && run_into_slot(call, step)) return;
  stack_ = stacks_[step];
  const kernels::ResultsScope scope(given_[step]);
  run_boxed(call, stack_);
  if (!call.made.empty()) put(tensors_in(stack_), made_[step]);
}

/// Defers the product of eager layers (nn/linear.h), from what lies in this entry.
void LiveEntry::defer(const ProgramCall& call, grad::WeightGradStore& store) const {
  const auto& raw = program_->values[static_cast<std::size_t>(call.direct->raw)];
  using Reads = grad::Product::Reads;
  store.put(call.direct->slot, {.sizes = raw.sizes,
                                .dtype = raw.dtype,
                                .reads = {value(call.arguments.at(0).values.at(0)),
                                          value(call.arguments.at(1).values.at(0))},
                                .form =
                                    [lease = lease_, alone = call.on_one_thread](const Reads& of) {
                                      const base::OneThread one(alone);
                                      return at::mm(of[0], of[1]);
                                    },
                                .write =
                                    [lease = lease_, alone = call.on_one_thread](
                                        const Reads& of, const at::Tensor& slot) {
                                      const base::OneThread one(alone);
                                      at::Tensor out = slot;
                                      at::mm_out(out, of[0], of[1]);
                                    }});
}

bool LiveEntry::run_into_slot(const ProgramCall& call, std::size_t step) {
  const auto& gradient = *call.direct;
  const auto& handed_in = program_->steps[call.gradient_step].gradient;
  if (auto* store = gradient.sink->store(); store != nullptr && handed_in.may_wait) {
    defer(call, *store);
    accepted_[call.gradient_step] = true;
    return true;
  }
  const at::Tensor& raw = value(gradient.raw);
  auto shared = gradient.sink->share(gradient.slot, {raw.sizes(), raw.scalar_type(), raw.device()},
                                     grad::Source::kCaptured);
  if (!shared) return false;
  stack_ = stacks_[step];
  stack_.back() = shared->tensor();
  run_boxed(call, stack_);
  stack_.clear();
  shared->mark_arrived();
  accepted_[call.gradient_step] = true;
  return true;
}

void LiveEntry::accept(const TapeGradient& gradient) const {
  gradient.sink->accept(gradient.slot, gradient.raw == kNone ? at::Tensor() : value(gradient.raw),
                        grad::Source::kCaptured);
}

}  // namespace tessera::capture
