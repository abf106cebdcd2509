// Tape: the operations of one region's forward and backward, as they went by below autograd.
//
// [Note: tape] While a TapeScope lives, every operation of its thread passes through a boxed
// fallback on a dispatch key of its own, which runs it and notes what it read, wrote and made. A
// value is identified by where it lies (memory, offset, sizes, strides, dtype), not by its tensor
// object: what autograd saves comes back as another one. The tape has weak references to memory, so
// that the bytes may be freed while no other memory gets the address. It holds memory from outside
// while it is open, and not afterwards (outside.h). Views are not noted: they are values of the
// same memory.
//
// A call that cannot be replayed is refused by name, at once, and still computes eagerly: random
// numbers, values that the host reads, sizes that follow from data, memory that an operation reads
// though none has written it (a kernel outside of the dispatcher did), changes of memory that came
// from outside. Values that are in no operation and in no memory, such as a number that the host
// computed, are found by comparing two tapes. Source: DeepSpeed PR 8038 takes raw gradients at the
// same place, in a graph. Next: region_program.h, regions.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "grad/keep.h"
#include "grad/region.h"
#include "kernels/watch.h"

namespace tessera::capture {

using MemoryId = std::int32_t;
using ValueId = std::int32_t;
inline constexpr std::int32_t kNone = -1;

/// A weak reference: it tells whether anyone else holds the memory, whose address is not reused
/// meanwhile.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

enum class MemoryKind : std::uint8_t {
  kMade,      ///< by an operation of the region
  kInput,     ///< of an argument
  kGradient,  ///< of a result's gradient
  kOutside,   ///< parameters, buffers, tables: the same memory in each call
};

struct Memory {
  MemoryKind kind = MemoryKind::kMade;
  std::int64_t bytes = 0;
  std::int32_t number = kNone;              ///< of kInput and kGradient: its number
  bool written = false;                     ///< by an operation, or from outside
  std::optional<WeakStorage> outside = {};  ///< of kOutside
};

/// Part of a memory, as an operation sees it.
struct Value {
  MemoryId memory = kNone;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;  ///< in elements
  bool operator==(const Value&) const = default;
};

/// One argument or result: tensors by their values, in the form in which the operation has them; or
/// the constant itself.
struct Slot {
  enum class Form : std::uint8_t { kConstant, kTensor, kTensors, kOptionalTensors };
  Form form = Form::kConstant;
  std::vector<ValueId> values;  ///< kNone: undefined
  c10::IValue constant;
};

struct TapeCall {
  c10::OperatorHandle operation;
  std::vector<Slot> arguments, results;
  std::vector<MemoryId> makes, writes;
  bool on_one_thread =
      false;  ///< its products (base/threads/product.h): their bits may depend on it
};

/// A tensor that an operation has read, whose memory is from outside. It existed before the region
/// ran: views that the region makes are not among them.
struct OutsideTensor {
  WeakTensor tensor;
  ValueId value = kNone;
};

/// A raw gradient that reaches its slot.
struct TapeGradient {
  grad::GradSink* sink = nullptr;
  grad::SlotId slot = 0;
  ValueId raw = kNone;
  bool may_wait = false;  ///< it was deferred: its product is the step before
};

struct TapeStep {
  std::optional<TapeCall> call;  ///< none: a gradient
  TapeGradient gradient = {};
};

class Tape : public grad::Recording, public kernels::Watcher {
 public:
  /// With `keeps_bits`, keeps a hash of what each operation gives, to be compared, until
  /// drop_values(). It holds no tensor: whether autograd takes a gradient over or copies it depends
  /// on who else holds it.
  explicit Tape(bool keeps_bits = false)
      : Watcher(kernels::SeesKernels::kYes), keeps_bits_(keeps_bits) {}

  /// Adds what enters before any operation: kNone for an undefined one.
  void add(MemoryKind kind, const std::vector<at::Tensor>& tensors);
  /// Returns where they lie after all operations; kNone for undefined ones.
  std::vector<ValueId> values_of(const std::vector<at::Tensor>& tensors);
  /// The steps that follow belong to the backward.
  void begin_backward() { forward_steps_ = steps_.size(); }

  const std::vector<TapeStep>& steps() const { return steps_; }
  std::size_t forward_steps() const { return forward_steps_.value_or(steps_.size()); }
  bool has_backward() const { return forward_steps_.has_value(); }
  const std::vector<Memory>& memories() const { return memories_; }
  const std::vector<Value>& values() const { return values_; }
  struct Seen {
    ValueId value = kNone;
    Hash128 bits;
  };
  /// Returns for each step what its operation gave and wrote, or the raw gradient.
  const std::vector<std::vector<Seen>>& kept() const { return kept_; }
  void drop_values() {
    kept_.assign(kept_.size(), {});
    taken_.clear();
    kept_results_.clear();
  }

  /// Returns the memory that operations have made and that does not leave by `handed`: it is not
  /// used once the call has ended.
  std::vector<WeakStorage> names_of_inner(const std::vector<std::vector<ValueId>>& handed) const;

  /// The tensors from outside, in the order in which they were first read.
  const std::vector<OutsideTensor>& outside_tensors() const { return outside_tensors_; }

  /// Ends the recording: releases the weak references, and memory from outside to its owners. Small
  /// pieces that stay on the heap keep large ones from growing together again.
  void close() {
    known_ = {};
    by_hash_ = {};
    names_ = {};
    held_ = {};
    views_ = {};
  }

  /// Returns why it cannot be replayed; empty: it can.
  const std::string& refused() const { return refused_; }

  /// Returns what keep() took out of a checkpoint, in order, arguments after the others; and what
  /// it kept.
  const std::vector<at::Tensor>& taken() const { return taken_; }
  const std::vector<at::Tensor>& kept_results() const { return kept_results_; }

  // --- grad::Recording ---
  void deferred(grad::GradSink& sink, grad::SlotId slot, const grad::Product& product) override;
  void keep(const at::Tensor& value, grad::CheckpointRun run) override;
  void gradient(grad::GradSink& sink, grad::SlotId slot, const at::Tensor& raw) override;
  void refuse(std::string_view why) override;

  // --- kernels::Watcher ---
  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
           c10::Stack* stack) override;

 private:
  MemoryId known_memory(const at::Tensor& tensor) const;
  MemoryId memory_of(const at::Tensor& tensor, MemoryKind if_new);
  ValueId value_of(const at::Tensor& tensor, MemoryKind if_new);
  ValueId seen_value_of(const at::Tensor& tensor, MemoryKind if_new);
  Slot slot_of(const c10::IValue& value, MemoryKind if_new);
  void refuse_operation(const c10::OperatorHandle& operation, const c10::Stack& stack);
  void refuse_change(const TapeCall& call);
  bool unwritten_in(const TapeCall& call) const;
  void note_writes(TapeCall& call);
  void refuse_resized(const TapeCall& call, const std::vector<c10::IValue>& written);
  void note_results(TapeCall& call, c10::ArrayRef<c10::IValue> results);
  std::vector<Seen> seen_in(c10::ArrayRef<c10::IValue> values);

  bool keeps_bits_;
  std::vector<TapeStep> steps_;
  std::vector<std::vector<Seen>> kept_;
  std::optional<std::size_t> forward_steps_;
  std::vector<Memory> memories_;
  std::vector<Value> values_;
  std::unordered_map<const c10::StorageImpl*, MemoryId> known_;
  std::unordered_multimap<std::size_t, ValueId> by_hash_;
  std::vector<WeakStorage> names_;  ///< no address is reused
  std::vector<c10::Storage> held_;  ///< of memory from outside, while this is recorded
  std::vector<OutsideTensor> outside_tensors_;
  std::vector<WeakTensor> views_;  ///< of memory from outside, made by operations
  std::size_t inputs_ = 0;
  std::vector<at::Tensor> taken_, kept_results_;
  std::string refused_;
};

/// While alive, `tape` sees the operations of this thread.
class TapeScope {
 public:
  explicit TapeScope(Tape& tape) : recording_(&tape), watch_(tape) {}

 private:
  grad::RecordingScope recording_;
  kernels::WatchScope watch_;
};

/// Returns the first step in which two tapes of one region differ, as text; empty: none. Compares
/// only where values come from: constants, memory from outside, sizes. `now` may have come to the
/// end of its forward only.
std::string difference_of(const Tape& before, const Tape& now);

/// Hashes all elements in order.
Hash128 bits_of(const at::Tensor& tensor);

/// Returns the memory from outside that still exists.
std::vector<c10::Storage> outside_of(const Tape& tape);

/// Hashes all bytes of each memory.
std::vector<Hash128> bits_of(const std::vector<c10::Storage>& memories);

/// Whether it is a value: not undefined, nor a number in place of a tensor, which is all value
/// itself.
bool is_value(const at::Tensor& tensor);

/// Whether the operation only allocates: its memory holds any former content.
bool only_finds_memory(const c10::OperatorHandle& operation);

/// "aten::mm.out", for messages.
std::string name_of(const c10::OperatorHandle& operation);

/// "the gradient of layers.0.weight", for messages.
std::string name_of(const TapeGradient& gradient);

}  // namespace tessera::capture
