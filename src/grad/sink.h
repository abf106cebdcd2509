// GradSink: the one way for a gradient to reach a collective. [Note: gradient lifetime]
//
//   eager autograd (a hook on each leaf, which sees the raw value) -+
//   deferred weight gradients (promise ... redeem) -----------------+-> accept() -> slot -> wire
//   captured backward ----------------------------------------------+   check, round if asked, add
//
// A slot is a parameter's place in its bucket's gradient buffer, in the contract's `accumulate`
// dtype: cast and add *is* the copy-in. Whatever dtype arrives is added unrounded unless the
// contract's `grad` asks for a rounding. What arrives first is a copy alone, which a kernel that
// writes its result into the slot saves: it is shared the slot for that. [Note: direct slots]
// Gradients are never counted ([Note: readiness] of fsdp/runtime/runtime.h); only tickets are. The
// sink owns no memory and starts no collective: slots belong to a SlotOwner (fsdp/runtime/bucket.h).
// Threads: those that run the rank's backward, one at a time.
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

/// kCaptured: of a recorded region that is replayed (../capture/replay/). It hands in what eager
/// autograd does.
enum class Source : std::uint8_t { kEager, kDeferred, kCaptured };
std::string_view to_string(Source source);

/// Where a slot's memory comes from and who wants to know what happens to it.
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
  /// The same for a kernel that writes the whole of it: [numel], where nothing is in it yet and
  /// nobody would have to be waited for, else undefined, and nothing happened. Nothing has arrived
  /// before end_loan() says so. Errors: as open_slot().
  virtual at::Tensor share_slot(std::size_t parameter) = 0;
  /// Once for each that share_slot() gave. Not `arrived`: as if nobody had asked, whatever stands in
  /// it.
  virtual void end_loan(std::size_t parameter, bool arrived) = 0;
  /// A ticket of this owner was opened (+1) or closed (-1).
  virtual void tickets_changed(int delta) = 0;
};

using SlotId = std::uint32_t;

class GradSink;
class WeightGradStore;

/// What a gradient will be, before there is one.
struct RawLike {
  at::IntArrayRef sizes;
  at::ScalarType dtype;
  at::Device device;
};

/// How a raw gradient is formed: shaped and typed as the backward would have given it.
struct Product {
  using Reads = std::vector<at::Tensor>;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  Reads reads;  ///< all that it is formed of
  /// In memory of its own.
  std::function<at::Tensor(const Reads& reads)> form;
  /// The same bits, all of them, into `slot`, contiguous and of these sizes and this dtype. Empty:
  /// there is no such way.
  std::function<void(const Reads& reads, const at::Tensor& slot)> write = {};

  at::Tensor formed() const { return form(reads); }
};

/// A slot that a kernel writes, the whole of it, as the first gradient of its parameter. [Note:
/// direct slots]
///
/// A product of a layer's size would be formed beside its slot and copied there; written into it
/// it is the same product, with the same bits: the slot is as contiguous and as aligned as fresh
/// memory. Later arrivals are formed beside it and added, since a product that adds to what stands
/// there rounds otherwise. Given back once, on the stream on which the kernel was launched, which
/// is the one that was current when it was shared; not given back (the kernel threw) it is as if
/// nobody had asked. It lives no longer than sink and unit. Threads: as the sink.
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

  /// As the tensor of this rank's layer, contiguous, `accumulate`.
  const at::Tensor& tensor() const { return tensor_; }
  /// It is written: the gradient has arrived. Errors: kInternal for a second time.
  void recycle();

 private:
  friend class GradSink;
  SharedSlot(GradSink* sink, SlotId id, at::Tensor tensor)
      : sink_(sink), id_(id), tensor_(std::move(tensor)) {}

  GradSink* sink_;  // null: it was given back, or moved from
  SlotId id_;
  at::Tensor tensor_;
};

/// Whose a weight gradient is that was put off, as a schedule names it.
struct WeightGradGroup {
  int stage = -1;  ///< of this rank; -1: there are no stages
  std::int64_t micro_batch = 0;
  bool operator==(const WeightGradGroup&) const = default;
};

/// A gradient that is owed: made by GradSink::promise(), handed back to redeem(). Copies are the
/// same ticket. It knows what it stands for, so that the sink keeps no book of what is settled.
class Ticket {
 public:
  Ticket() = default;
  SlotId slot() const { return promise_->slot; }  ///< of one that was promised

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
  /// `contract` must outlive the sink or be replaced by update(); `parameter` is the owner's own
  /// number.
  SlotId add(const GradContract* contract, SlotOwner* owner, std::size_t parameter);
  /// The slot's parameter moved to another unit or contract.
  void update(SlotId slot, const GradContract* contract, SlotOwner* owner, std::size_t parameter);

  /// The slot's parameter is gone, and with it what it was owed.
  void remove(SlotId slot);

  /// Checks `raw` against the contract and adds it to the slot. An undefined gradient is nothing.
  /// Shapes: raw as the tensor of this rank's layer. Errors: kContract naming the parameter, for
  /// sparse or complex gradients, a wrong shape or device, a gradient that itself requires grad
  /// (create_graph).
  void accept(SlotId slot, const at::Tensor& raw, Source source);
  /// The same of a gradient that is zero but for some rows of its first dim, `raw` [U, ...] in the
  /// `rows` [U] i64, each named once: as accept() would add the whole of it, which nobody has to
  /// make. Errors: as accept(), kInternal for rows that are not there.
  void accept_rows(SlotId slot, const at::Tensor& rows, const at::Tensor& raw, Source source);

  /// Lends the slot to a kernel, where what it would write is what accept() would leave: the first
  /// arrival, of a parameter without `grad`, in the dtype of the slot and on its device. Else none,
  /// nothing happened, and the gradient goes through accept(). Where it was put off, the source
  /// says so. Errors: as accept().
  std::optional<SharedSlot> lend(SlotId slot, const RawLike& raw, Source source);
  /// Lets `product` write its gradient into the slot, where that may be shared and is nothing that
  /// the product reads; else false, and nothing happened. Errors: as lend(), those of the product.
  bool write(SlotId slot, const Product& product, Source source);

  /// Announces a gradient that will come after this backward's nodes ran: its unit is not ready
  /// before.
  Ticket promise(SlotId slot, std::string layer, WeightGradGroup group);
  Ticket promise(SlotId slot, std::string layer, std::int64_t micro_batch) {
    return promise(slot, std::move(layer), {-1, micro_batch});
  }
  /// Hands it in. Errors: kContract for a ticket that was redeemed before (in whatever step), or
  /// dropped, naming parameter, layer and micro-batch; for one of another sink.
  void redeem(const Ticket& ticket, const at::Tensor& raw);
  /// The same, formed now: in the slot, where that may be shared.
  void redeem(const Ticket& ticket, const Product& product);
  /// Throws kContract naming every ticket that is still open. `before`: what it stands in front of.
  void require_all_redeemed(const char* before) const;
  /// The same of those that `is_meant` says.
  void require_redeemed(
      const char* before,
      const std::function<bool(const SlotOwner&, WeightGradGroup)>& is_meant) const;
  std::size_t open_tickets() const { return open_.size(); }
  /// Forgets all tickets (after an exception). Owners are not told: nothing of theirs goes on.
  void drop_tickets();

  const GradContract& contract(SlotId slot) const { return *slots_.at(slot).contract; }

  /// Where layers put off their weight gradients; null: they do not.
  WeightGradStore* store() const { return store_; }
  void set_store(WeightGradStore* store) { store_ = store; }
  /// Where a backward that forms them leaves those that are to be formed while one of its exchanges
  /// is under way; null: nowhere.
  WeightGradStore* under_exchange() const { return under_exchange_; }
  void set_under_exchange(WeightGradStore* store) { under_exchange_ = store; }

 private:
  struct Entry {
    const GradContract* contract = nullptr;
    SlotOwner* owner = nullptr;
    std::size_t parameter = 0;
    std::vector<std::int64_t> local_shape;  // empty: the contract's
  };
  static Entry entry_of(const GradContract* contract, SlotOwner* owner, std::size_t parameter);
  friend class SharedSlot;
  void end_loan(SlotId slot, const at::Tensor& written, bool arrived);
  static const std::vector<std::int64_t>& shape_of(const Entry& entry);
  static void check_dtype(const Entry& entry, at::ScalarType dtype, Source source);
  static void check_shape(const Entry& entry, at::IntArrayRef found, at::IntArrayRef expected,
                          Source source);
  static void check_trainable(const Entry& entry, Source source);
  /// `rows`: how many of its first dim raw has; -1: all.
  static void check(const Entry& entry, const at::Tensor& raw, std::int64_t rows, Source source);
  const Ticket::Promise& open_promise(const Ticket& ticket) const;
  void close(const Ticket& ticket);

  std::vector<Entry> slots_;
  std::vector<std::shared_ptr<Ticket::Promise>> open_;  // in the order of promise()
  WeightGradStore* store_ = nullptr;
  WeightGradStore* under_exchange_ = nullptr;
};

/// Weight gradients that a backward leaves for later, so that the gradients of inputs, for which
/// others wait, come first.
///
/// What is put holds the inputs of its product (a layer's input and the gradient of its output)
/// until run() forms it: that is the price. Tickets keep the units from being reduced before. A
/// model has two of them: what waits for run_weight_gradients(), and GradSink::under_exchange(),
/// which a backward fills and empties. Threads as the sink. On a device a product is formed on the
/// stream that is current then, behind the one that made its inputs. Source: zero-bubble schedules
/// (arXiv 2401.10241), which split a backward in this way. Next: ../nn/linear.h.
class WeightGradStore {
 public:
  explicit WeightGradStore(GradSink& sink) : sink_(sink) {}

  /// A backward begins: the next micro-batch, as errors name it, counted from 0 since run().
  void begin_micro_batch() { begin({-1, counted_++}); }
  /// The same of a schedule, whose own numbers these are.
  void begin(WeightGradGroup group) { group_ = group; }
  WeightGradGroup group() const { return group_; }
  /// `made_on`: the stream of a device on which the inputs of the product were made.
  void put(SlotId slot, Product product, const comm::Stream& made_on = {});
  /// Forms what was put, oldest first, and hands it to the sink. Where a product throws, those
  /// after it stay owed.
  void form_all();
  /// The same, and counts micro-batches from 0 again.
  void run();
  /// The same of one group alone.
  void run(WeightGradGroup group);
  /// Forgets everything (after an exception); the sink forgets the tickets.
  void drop();
  std::size_t size() const { return pending_.size(); }

 private:
  struct PendingBackward {
    WeightGradGroup group;
    Ticket ticket;
    Product product;
    comm::Stream made_on;
  };
  void form(std::size_t place);  ///< in `owed_`
  void hand_in(const PendingBackward& pending);

  GradSink& sink_;
  std::deque<PendingBackward> pending_;
  WeightGradGroup group_;
  std::int64_t counted_ = 0;
};

}  // namespace tessera::grad
