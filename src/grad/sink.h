// GradSink: the one way for a gradient to reach a collective. [Note: gradient lifetime]
//
//   eager autograd (a hook on each leaf, which sees the raw value) -+
//   deferred weight gradients (promise ... redeem) -----------------+-> accept() -> slot -> wire
//   captured backward ----------------------------------------------+   check, round if asked, add
//
// A slot is a parameter's place in its bucket's gradient buffer, in the contract's `accumulate`
// dtype: cast and add *is* the copy-in. Any dtype that arrives is added unrounded unless the
// contract's `grad` asks for a rounding. The first arrival is a mere copy, which is saved where a
// kernel writes its result into the slot. [Note: direct slots] Gradients are never counted ([Note:
// readiness] in fsdp/runtime/runtime.h); only tickets are. The sink owns no memory and starts no
// collective: slots belong to a SlotOwner (fsdp/runtime/bucket.h). Threads: those that run the
// rank's backward, one at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/stream.h"
#include "tessera/contract.h"

namespace tessera::grad {

/// kCaptured: from a recorded region that is replayed (../capture/replay/). It passes the gradients
/// that eager autograd would.
enum class Source : std::uint8_t { kEager, kDeferred, kCaptured };
std::string_view to_string(Source source);

/// Provides the memory of slots and is told of their changes.
class SlotOwner {
 public:
  virtual ~SlotOwner() = default;
  struct View {
    at::Tensor slot;  ///< [numel], contract.accumulate
    bool first;       ///< nothing is in it yet: overwrite
  };
  /// Opens the slot for one contribution. Errors: kContract when no forward of the unit is open
  /// ([Note: gradient lifetime]), kInternal while its buffer is in flight.
  virtual View open_slot(std::size_t parameter) = 0;
  /// Shares the slot with a kernel that writes all of it: [numel]. Undefined, without effect, where
  /// the slot is not empty or would have to be waited for. The gradient arrives with end_share().
  /// Errors: as open_slot().
  virtual at::Tensor share_slot(std::size_t parameter) = 0;
  /// Ends what share_slot() began; must be called once. Without `arrived` the slot counts as empty,
  /// with any contents.
  virtual void end_share(std::size_t parameter, bool arrived) = 0;
  /// A ticket of this owner was opened (+1) or closed (-1).
  virtual void tickets_changed(int delta) = 0;
};

using SlotId = std::uint32_t;

class GradSink;
class WeightGradStore;

/// The sizes, dtype and device of a gradient that is not formed yet.
struct RawLike {
  at::IntArrayRef sizes;
  at::ScalarType dtype;
  at::Device device;
};

/// Forms a raw gradient, with the shape and dtype that the backward would return.
struct Product {
  using Reads = std::vector<at::Tensor>;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  Reads reads;  ///< all tensors that it is formed from
  /// Returns it in new memory.
  std::function<at::Tensor(const Reads& reads)> form;
  /// Writes the same bits to `slot`, which is contiguous and has these sizes and this dtype. Empty
  /// where that is not possible.
  std::function<void(const Reads& reads, const at::Tensor& slot)> write = {};

  at::Tensor formed() const { return form(reads); }
};

/// A slot that a kernel writes as the first gradient of its parameter. [Note: direct slots]
///
/// Otherwise a product of a layer's size would be formed in new memory and copied to its slot.
/// Written into the slot it has the same bits: the slot is as contiguous and as aligned as new
/// memory. Later arrivals are formed in new memory and added, since a product that adds to present
/// values rounds differently. mark_arrived() must be called once, on the stream on which the kernel
/// was launched and which was current when the slot was shared. Without it (the kernel threw) the
/// slot counts as not shared. It must not outlive sink and unit. Threads: as the sink.
class SharedSlot {
 public:
  SharedSlot(SharedSlot&& other) noexcept
      : sink_(std::exchange(other.sink_, nullptr)),
        id_(other.id_),
        tensor_(std::move(other.tensor_)) {}
  SharedSlot& operator=(SharedSlot&&) = delete;
  SharedSlot(const SharedSlot&) = delete;
  SharedSlot& operator=(const SharedSlot&) = delete;
  ~SharedSlot();

  /// The slot, in the shape of this rank's layer, contiguous, in the dtype `accumulate`.
  const at::Tensor& tensor() const { return tensor_; }
  /// Notes that the gradient was written and has arrived. Errors: kInternal for a second call.
  void mark_arrived();

 private:
  friend class GradSink;
  SharedSlot(GradSink* sink, SlotId id, at::Tensor tensor)
      : sink_(sink), id_(id), tensor_(std::move(tensor)) {}

  GradSink* sink_;  // null after mark_arrived(), or when moved from
  SlotId id_;
  at::Tensor tensor_;
};

/// The stage and micro-batch of a deferred weight gradient, as a schedule names them.
struct WeightGradGroup {
  int stage = -1;  ///< of this rank; -1: there are no stages
  std::int64_t micro_batch = 0;
  bool operator==(const WeightGradGroup&) const = default;
};

/// A pending gradient: GradSink::promise() makes it and redeem() takes it. Copies are the same
/// ticket. It holds its own state, so that the sink need not record redeemed tickets.
class Ticket {
 public:
  Ticket() = default;
  SlotId slot() const { return promise_->slot; }  ///< must not be empty

 private:
  friend class GradSink;
  enum class State : std::uint8_t { kOpen, kRedeemed, kDropped };
  struct Promise {
    const GradSink* sink;
    SlotId slot;
    std::string parameter;
    std::string layer;
    WeightGradGroup group;
    State state = State::kOpen;
    std::string text() const;
  };
  std::shared_ptr<Promise> promise_;
};

class GradSink {
 public:
  /// `contract` must outlive the sink or be replaced by update(). `parameter`: the owner's number
  /// of the slot.
  SlotId add(const GradContract* contract, SlotOwner* owner, std::size_t parameter);
  /// Changes the owner or contract of the slot's parameter.
  void update(SlotId slot, const GradContract* contract, SlotOwner* owner, std::size_t parameter);

  /// Removes the slot, and drops its tickets.
  void remove(SlotId slot);

  /// Checks `raw` against the contract and adds it to the slot. An undefined gradient is skipped.
  /// Shapes: raw as the tensor of this rank's layer. Errors: kContract naming the parameter, for
  /// sparse or complex gradients, a wrong shape or device, a gradient that itself requires grad
  /// (create_graph).
  void accept(SlotId slot, const at::Tensor& raw, Source source);
  /// Adds a gradient that is zero except for some rows of its first dim: `raw` [U, ...] are the
  /// rows with the numbers `rows` [U] i64, each named once. Does what accept() does with the whole
  /// gradient, which need not be formed. Errors: those of accept(), kInternal for rows that do not
  /// exist.
  void accept_rows(SlotId slot, const at::Tensor& rows, const at::Tensor& raw, Source source);

  /// Shares the slot with a kernel, where writing it has the result of accept(): for the first
  /// arrival of a parameter without `grad`, in the dtype of the slot and on its device. Returns
  /// none, without effect, otherwise; the gradient then goes through accept(). `source` says
  /// whether it was deferred. Errors: as accept().
  std::optional<SharedSlot> share(SlotId slot, const RawLike& raw, Source source);
  /// Lets `product` write its gradient into the slot, where that can be shared and the product does
  /// not read it; else returns false, without effect. Errors: those of share() and of the product.
  bool write(SlotId slot, const Product& product, Source source);

  /// Announces a gradient that will come after the nodes of this backward ran. Its unit is not
  /// reduced before it.
  Ticket promise(SlotId slot, std::string layer, WeightGradGroup group);
  Ticket promise(SlotId slot, std::string layer, std::int64_t micro_batch) {
    return promise(slot, std::move(layer), {-1, micro_batch});
  }
  /// Adds the gradient of a ticket. Errors: kContract, naming parameter, layer and micro-batch, for
  /// a ticket that was redeemed before (in any step) or dropped; for one of another sink.
  void redeem(const Ticket& ticket, const at::Tensor& raw);
  /// Forms the gradient of a ticket now, in the slot where that can be shared.
  void redeem(const Ticket& ticket, const Product& product);
  /// Throws kContract naming every ticket that is still open. `before`: the call that requires it,
  /// for messages.
  void require_all_redeemed(const char* before) const;
  /// Throws kContract naming the open tickets for which `is_meant` returns true.
  void require_redeemed(
      const char* before,
      const std::function<bool(const SlotOwner&, WeightGradGroup)>& is_meant) const;
  std::size_t open_tickets() const { return open_.size(); }
  /// Forgets all tickets (after an exception). Owners are not told: they forget everything, too.
  void drop_tickets();

  const GradContract& contract(SlotId slot) const { return *slots_.at(slot).contract; }

  /// The store of deferred weight gradients; null: layers do not defer them.
  WeightGradStore* store() const { return store_; }
  void set_store(WeightGradStore* store) { store_ = store; }
  /// The store of weight gradients that a backward forms while one of its exchanges is under way;
  /// null: none.
  WeightGradStore* under_exchange() const { return under_exchange_; }
  void set_under_exchange(WeightGradStore* store) { under_exchange_ = store; }

 private:
  struct Entry {
    const GradContract* contract = nullptr;
    SlotOwner* owner = nullptr;
    std::size_t parameter = 0;
    std::vector<std::int64_t> local_shape;  // empty: that of the contract
  };
  static Entry entry_of(const GradContract* contract, SlotOwner* owner, std::size_t parameter);
  friend class SharedSlot;
  void end_share(SlotId slot, const at::Tensor& written, bool arrived);
  static const std::vector<std::int64_t>& shape_of(const Entry& entry);
  static void check_dtype(const Entry& entry, at::ScalarType dtype, Source source);
  static void check_shape(const Entry& entry, at::IntArrayRef found, at::IntArrayRef expected,
                          Source source);
  static void check_trainable(const Entry& entry, Source source);
  /// `rows`: the number of rows of the first dim that raw has; -1: all.
  static void check(const Entry& entry, const at::Tensor& raw, std::int64_t rows, Source source);
  const Ticket::Promise& open_promise(const Ticket& ticket) const;
  void close(const Ticket& ticket);

  std::vector<Entry> slots_;
  std::vector<std::shared_ptr<Ticket::Promise>> open_;  // in the order of promise()
  WeightGradStore* store_ = nullptr;
  WeightGradStore* under_exchange_ = nullptr;
};

/// Weight gradients that a backward defers, so that gradients of inputs, for which other ranks
/// wait, come first.
///
/// A deferred product keeps its inputs (a layer's input and the gradient of its output) until run()
/// forms it, which costs memory. Tickets keep the units from being reduced before that. A model has
/// two stores: one for run_weight_gradients(), and GradSink::under_exchange(), which a backward
/// fills and empties. Threads: as the sink. On a device a product is formed on the current stream,
/// ordered after the stream that made its inputs. Source: zero-bubble schedules (arXiv 2401.10241),
/// which split a backward in this way. Next: ../nn/linear.h.
class WeightGradStore {
 public:
  explicit WeightGradStore(GradSink& sink) : sink_(sink) {}

  /// Begins a backward: that of the next micro-batch, counted from 0 since run(), as errors name
  /// it.
  void begin_micro_batch() { begin({-1, counted_++}); }
  /// Begins a backward with the numbers of a schedule.
  void begin(WeightGradGroup group) { group_ = group; }
  WeightGradGroup group() const { return group_; }
  /// `made_on`: the stream of a device on which the inputs of the product were made.
  void put(SlotId slot, Product product, const comm::Stream& made_on = {});
  /// Forms the deferred gradients, oldest first, and passes them to the sink. Where a product
  /// throws, those after it stay pending.
  void form_all();
  /// Does that, and counts micro-batches from 0 again.
  void run();
  /// Forms the gradients of one group alone.
  void run(WeightGradGroup group);
  /// Forgets everything (after an exception). The sink forgets the tickets.
  void drop();
  std::size_t size() const { return pending_.size(); }

 private:
  struct PendingGrad {
    WeightGradGroup group;
    Ticket ticket;
    Product product;
    comm::Stream made_on;
  };
  void form(std::size_t place);  ///< index in pending_
  void hand_in(const PendingGrad& pending);

  GradSink& sink_;
  std::deque<PendingGrad> pending_;
  WeightGradGroup group_;
  std::int64_t counted_ = 0;
};

}  // namespace tessera::grad
