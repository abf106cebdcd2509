#include "capture/replay/tape.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <span>
#include <sstream>

#include "base/hash.h"
#include "base/threads/product.h"
#include "kernels/operations.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

std::size_t hash_of(const Value& value) {
  Hasher hash;
  hash.add(static_cast<std::int64_t>(value.memory)).add(value.offset);
  for (const auto size : value.sizes) hash.add(size);
  for (const auto stride : value.strides) hash.add(stride);
  return static_cast<std::size_t>(hash.digest());
}

/// Whether it changes an argument that its schema does not name: a batch norm updates its running
/// sums.
bool changes_unsaid(const TapeCall& call) {
  constexpr std::size_t kMean = 3, kTraining = 5;
  const auto& arguments = call.arguments;
  return call.operation.operator_name().name == "aten::native_batch_norm" &&
         arguments[kTraining].constant.toBool() && !arguments[kMean].values.empty();
}

/// Whether the arguments of an operation that may draw random numbers rule that out: attention
/// without dropout, dropout that is not in training. In training it draws even with probability 0.
bool draws_nothing(const c10::FunctionSchema& schema, const c10::Stack& stack) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i].name();
    const auto& given = torch::jit::peek(stack, i, arguments.size());
    if (name == "dropout_p" && given.isDouble() && given.toDouble() == 0.0) return true;
    if (name == "train" && given.isBool() && !given.toBool()) return true;
  }
  return false;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool same_constants(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    const at::Tensor &one = a.toTensor(), &other = b.toTensor();
    if (!one.defined() || !other.defined()) return one.defined() == other.defined();
    return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
           at::equal(one, other);
  }
  return a.tagKind() == b.tagKind() && a == b;
}

bool same_slots(const std::vector<Slot>& before, const std::vector<Slot>& now) {
  return std::equal(
      before.begin(), before.end(), now.begin(), now.end(), [](const Slot& a, const Slot& b) {
        return a.form == b.form && a.values == b.values && same_constants(a.constant, b.constant);
      });
}

std::string words_of(const TapeStep& step) {
  if (step.call) return name_of(step.call->operation);
  return name_of(step.gradient);
}

}  // namespace

std::string name_of(const c10::OperatorHandle& operation) {
  return c10::toString(operation.operator_name());
}

std::string name_of(const TapeGradient& gradient) {
  return concat("the gradient of ", gradient.sink->contract(gradient.slot).name);
}

bool is_value(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool only_finds_memory(const c10::OperatorHandle& operation) {
  const std::string& name = operation.operator_name().name;
  return name == "aten::empty" || name == "aten::empty_strided" || name == "aten::empty_like" ||
         name == "aten::new_empty" || name == "aten::new_empty_strided";
}

void Tape::refuse(std::string_view why) {
  if (refused_.empty()) refused_ = why;
}

MemoryId Tape::known_memory(const at::Tensor& tensor) const {
  const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
  return found == known_.end() ? kNone : found->second;
}

MemoryId Tape::memory_of(const at::Tensor& tensor, MemoryKind if_new) {
  if (const MemoryId known = known_memory(tensor); known != kNone) return known;
  const auto& storage = tensor.storage();
  const auto id = static_cast<MemoryId>(memories_.size());
  known_.emplace(storage.unsafeGetStorageImpl(), id);
  names_.emplace_back(storage.getWeakStorageImpl());
  Memory memory{if_new, static_cast<std::int64_t>(storage.nbytes()), kNone,
                if_new != MemoryKind::kMade};
  if (if_new == MemoryKind::kOutside) {
    memory.outside = storage.getWeakStorageImpl();
    held_.push_back(storage);
  }
  memories_.push_back(std::move(memory));
  return id;
}

ValueId Tape::value_of(const at::Tensor& tensor, MemoryKind if_new) {
  if (!tensor.defined()) return kNone;
  if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_conj() ||
      tensor.is_neg()) {
    refuse("a tensor that is not a dense one");
    return kNone;
  }
  Value value{memory_of(tensor, if_new), tensor.scalar_type(), tensor.sizes().vec(),
              tensor.strides().vec(), tensor.storage_offset()};
  const std::size_t hash = hash_of(value);
  const auto [begin, end] = by_hash_.equal_range(hash);
  const auto found = std::find_if(begin, end, [&](const auto& entry) {
    return values_[static_cast<std::size_t>(entry.second)] == value;
  });
  if (found != end) return found->second;
  const auto id = static_cast<ValueId>(values_.size());
  values_.push_back(std::move(value));
  by_hash_.emplace(hash, id);
  return id;
}

void Tape::add(MemoryKind kind, const std::vector<at::Tensor>& tensors) {
  if (kind == MemoryKind::kInput) inputs_ = tensors.size();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    if (tensors[i].has_storage() && known_memory(tensors[i]) != kNone) {
      refuse(kind == MemoryKind::kInput ? "arguments that share memory"
                                        : "gradients that share memory");
    }
    const ValueId value = value_of(tensors[i], kind);
    if (value == kNone) continue;
    memories_[static_cast<std::size_t>(values_[static_cast<std::size_t>(value)].memory)].number =
        static_cast<std::int32_t>(i);
  }
}

std::vector<ValueId> Tape::values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueId> ids;
  for (const auto& tensor : tensors) ids.push_back(value_of(tensor, MemoryKind::kOutside));
  return ids;
}

/// Notes an argument of an operation, or with kMade a result. Tensors are told apart by identity,
/// since a member that is set to another tensor later may lie in the same memory.
ValueId Tape::seen_value_of(const at::Tensor& tensor, MemoryKind if_new) {
  const ValueId value = value_of(tensor, if_new);
  if (value == kNone) return kNone;
  const MemoryId memory = values_[static_cast<std::size_t>(value)].memory;
  if (memories_[static_cast<std::size_t>(memory)].kind != MemoryKind::kOutside) return value;
  const auto is_it = [&](const WeakTensor& other) {
    return other._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  };
  if (std::ranges::any_of(views_, is_it) ||
      std::ranges::any_of(outside_tensors_, is_it, &OutsideTensor::tensor)) {
    return value;
  }
  const WeakTensor name(tensor.getIntrusivePtr());
  if (if_new == MemoryKind::kMade) {
    views_.push_back(name);
  } else {
    outside_tensors_.push_back({name, value});
  }
  return value;
}

Slot Tape::slot_of(const c10::IValue& value, MemoryKind if_new) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!is_value(tensor)) return {Slot::Form::kConstant, {}, value};
    return {Slot::Form::kTensor, {seen_value_of(tensor, if_new)}, {}};
  }
  Slot slot;
  if (value.isTensorList()) {
    slot.form = Slot::Form::kTensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      slot.values.push_back(seen_value_of(tensor, if_new));
    }
  } else if (value.isOptionalTensorList()) {
    slot.form = Slot::Form::kOptionalTensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      slot.values.push_back(tensor ? seen_value_of(*tensor, if_new) : kNone);
    }
  } else {
    slot.constant = value;
  }
  return slot;
}

void Tape::refuse_operation(const c10::OperatorHandle& operation, const c10::Stack& stack) {
  const auto is = [&](at::Tag tag) { return operation.hasTag(tag); };
  if (is(at::Tag::nondeterministic_seeded) && !draws_nothing(operation.schema(), stack)) {
    refuse(concat("random numbers, of ", name_of(operation)));
  } else if (is(at::Tag::data_dependent_output)) {
    refuse(concat("values that the host reads, by ", name_of(operation)));
  } else if (is(at::Tag::dynamic_output_shape)) {
    refuse(concat("sizes that follow from data, of ", name_of(operation)));
  } else if (is(at::Tag::inplace_view)) {
    refuse(concat("a tensor that becomes another one, by ", name_of(operation)));
  }
}

void Tape::refuse_change(const TapeCall& call) {
  refuse(concat("a change of what came in from outside, by ", name_of(call.operation)));
}

/// Whether the operation, which has not run yet, may read memory in which nothing was written.
bool Tape::unwritten_in(const TapeCall& call) const {
  const auto& schema = call.operation.schema().arguments();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (is_written(schema[i])) continue;
    for (const ValueId value : call.arguments[i].values) {
      if (value == kNone) continue;
      const MemoryId memory = values_[static_cast<std::size_t>(value)].memory;
      if (!memories_[static_cast<std::size_t>(memory)].written) return true;
    }
  }
  return false;
}

void Tape::note_writes(TapeCall& call) {
  const auto& schema = call.operation.schema().arguments();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (!is_written(schema[i])) continue;
    for (const ValueId value : call.arguments[i].values) {
      if (value == kNone) continue;
      const MemoryId id = values_[static_cast<std::size_t>(value)].memory;
      Memory& memory = memories_[static_cast<std::size_t>(id)];
      if (memory.kind != MemoryKind::kMade) {
        refuse_change(call);
      }
      memory.written = true;
      call.writes.push_back(id);
    }
  }
}

/// Refuses resized memory, which is laid out at the size at which it was first seen.
void Tape::refuse_resized(const TapeCall& call, const std::vector<c10::IValue>& written) {
  const auto look_at = [&](const at::Tensor& tensor) {
    const MemoryId id = is_value(tensor) && tensor.has_storage() ? known_memory(tensor) : kNone;
    if (id == kNone) return;
    const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    if (memories_[static_cast<std::size_t>(id)].bytes == bytes) return;
    refuse(concat("memory that becomes larger or smaller, by ", name_of(call.operation)));
  };
  for (const auto& value : written) {
    if (value.isTensor()) {
      look_at(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) look_at(each);
    }
  }
}

void Tape::note_results(TapeCall& call, c10::ArrayRef<c10::IValue> results) {
  const auto before = memories_.size();
  for (const auto& result : results) {
    call.results.push_back(slot_of(result, MemoryKind::kMade));
  }
  const bool is_written_now = !only_finds_memory(call.operation);
  for (std::size_t i = before; i < memories_.size(); ++i) {
    memories_[i].written = is_written_now;
    call.makes.push_back(static_cast<MemoryId>(i));
  }
}

std::vector<WeakStorage> Tape::names_of_inner(
    const std::vector<std::vector<ValueId>>& handed) const {
  std::vector<bool> is_handed(memories_.size());
  for (const auto& values : handed) {
    for (const ValueId value : values) {
      if (value == kNone) continue;
      is_handed[static_cast<std::size_t>(values_[static_cast<std::size_t>(value)].memory)] = true;
    }
  }
  std::vector<WeakStorage> names;
  for (std::size_t i = 0; i < memories_.size(); ++i) {
    if (memories_[i].kind == MemoryKind::kMade && !is_handed[i]) names.push_back(names_[i]);
  }
  return names;
}

Hash128 bits_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
  return Hash128Stream().add(std::span(bytes, values.nbytes())).digest();
}

std::vector<c10::Storage> outside_of(const Tape& tape) {
  std::vector<c10::Storage> all;
  for (const auto& memory : tape.memories()) {
    if (memory.kind != MemoryKind::kOutside) continue;
    if (auto held = memory.outside->lock()) all.emplace_back(std::move(held));
  }
  return all;
}

std::vector<Hash128> bits_of(const std::vector<c10::Storage>& memories) {
  std::vector<Hash128> all;
  for (const auto& memory : memories) {
    const auto* first = static_cast<const std::byte*>(memory.data());
    all.push_back(Hash128Stream().add(std::span(first, memory.nbytes())).digest());
  }
  return all;
}

std::vector<Tape::Seen> Tape::seen_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<Seen> all;
  const auto see = [&](const at::Tensor& tensor) {
    if (is_value(tensor)) all.push_back({value_of(tensor, MemoryKind::kMade), bits_of(tensor)});
  };
  for (const auto& value : values) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) see(each);
    }
  }
  return all;
}

void Tape::run(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kernels::kWatchKey);
  if (!refused_.empty()) return operation.redispatchBoxed(keys, stack);
  const auto& schema = operation.schema();
  TapeCall call{operation, {}, {}, {}, {}, base::OneThread::in_this_thread()};
  refuse_operation(operation, *stack);
  std::vector<c10::IValue> written;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = torch::jit::peek(*stack, i, schema.arguments().size());
    call.arguments.push_back(slot_of(argument, MemoryKind::kOutside));
    if (is_written(schema.arguments()[i])) written.push_back(argument);
  }
  if (changes_unsaid(call)) refuse_change(call);
  const auto unwritten = unwritten_in(call);
  operation.redispatchBoxed(keys, stack);
  if (!refused_.empty()) return;
  note_writes(call);
  refuse_resized(call, written);
  const auto results = torch::jit::last(*stack, schema.returns().size());
  note_results(call, results);
  if (call.makes.empty() && call.writes.empty()) return;  // a view, or what it is like
  if (unwritten && !only_finds_memory(operation)) {
    refuse(concat("memory that ", name_of(operation),
                  " reads and no operation has written, as a kernel outside the dispatcher does"));
  }
  kept_.emplace_back();
  if (keeps_bits_ && !only_finds_memory(operation)) {
    kept_.back() = seen_in(results);
    for (const auto& seen : seen_in(written)) kept_.back().push_back(seen);
  }
  steps_.push_back({std::move(call), {}});
}

void Tape::keep(const at::Tensor& value, grad::CheckpointRun run) {
  if (run == grad::CheckpointRun::kFirst) {
    kept_results_.push_back(value);
    return;
  }
  if (known_memory(value) != kNone) refuse("results of a checkpoint that share memory");
  const ValueId id = value_of(value, MemoryKind::kInput);
  if (id == kNone) return;
  memories_[static_cast<std::size_t>(values_[static_cast<std::size_t>(id)].memory)].number =
      static_cast<std::int32_t>(inputs_ + taken_.size());
  taken_.push_back(value);
}

void Tape::gradient(grad::GradSink& sink, grad::SlotId slot, const at::Tensor& raw) {
  const auto before = memories_.size();
  const ValueId value = value_of(raw, MemoryKind::kOutside);
  if (memories_.size() != before) {
    refuse("a gradient that no operation of the region has made");
  }
  steps_.push_back({std::nullopt, {&sink, slot, value}});
  kept_.emplace_back();
  if (!keeps_bits_ || value == kNone || !refused_.empty()) return;
  const c10::impl::ExcludeDispatchKeyGuard unseen(kernels::kWatchKey);
  kept_.back().push_back({value, bits_of(raw)});
}

/// Records the product as part of the region, and forms it here once more.
void Tape::deferred(grad::GradSink& sink, grad::SlotId slot, const grad::Product& product) {
  const c10::impl::IncludeDispatchKeyGuard watched(kernels::kWatchKey);
  gradient(sink, slot, product.formed());
  steps_.back().gradient.may_wait = true;
}

namespace {

/// Whether both are of the same operation, or for the same slot.
bool same_names(const TapeStep& before, const TapeStep& now) {
  if (before.call.has_value() != now.call.has_value()) return false;
  if (before.call) {
    return before.call->operation.operator_name() == now.call->operation.operator_name();
  }
  return before.gradient.sink == now.gradient.sink && before.gradient.slot == now.gradient.slot;
}

/// Returns the difference of one step; empty: none.
std::string difference_of(const TapeStep& before, const TapeStep& now) {
  if (!same_names(before, now))
    return concat("found ", words_of(now), ", expected ", words_of(before));
  const bool is_same = before.call ? same_slots(before.call->arguments, now.call->arguments) &&
                                         same_slots(before.call->results, now.call->results)
                                   : before.gradient.may_wait == now.gradient.may_wait &&
                                         before.gradient.raw == now.gradient.raw;
  return is_same ? "" : concat(words_of(now), ": found other arguments than before");
}

std::string difference_of(const Memory& before, const Memory& now) {
  if (before.kind != now.kind || before.number != now.number) {
    return "found memory of another kind than before";
  }
  if (before.kind == MemoryKind::kOutside &&
      before.outside->_unsafe_get_target() != now.outside->_unsafe_get_target()) {
    return "found other memory from outside than before: a tensor that is no argument changes from "
           "call to call";
  }
  return {};
}

}  // namespace

std::string difference_of(const Tape& before, const Tape& now) {
  const auto &old_steps = before.steps(), &new_steps = now.steps();
  for (std::size_t i = 0; i < new_steps.size(); ++i) {
    if (i >= old_steps.size()) return concat("found ", words_of(new_steps[i]), " behind the last");
    if (auto why = difference_of(old_steps[i], new_steps[i]); !why.empty()) return why;
  }
  const bool has_backward = now.has_backward();
  if (now.forward_steps() != before.forward_steps() ||
      (has_backward && old_steps.size() != new_steps.size())) {
    return concat("found the end before ", words_of(old_steps[new_steps.size()]));
  }
  for (std::size_t i = 0; i < now.values().size(); ++i) {
    if (i >= before.values().size() || before.values()[i] != now.values()[i]) {
      return "found values in other places than before";
    }
  }
  for (std::size_t i = 0; i < now.memories().size(); ++i) {
    if (auto why = difference_of(before.memories()[i], now.memories()[i]); !why.empty()) return why;
  }
  return {};
}

}  // namespace tessera::capture
