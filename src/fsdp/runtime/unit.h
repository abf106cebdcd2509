// Unit: the parameters that are gathered and reduced together, usually a block.
//
// Knows its parameters, leaves and buckets, and lays them out; it decides nothing about order
// (fsdp/runtime/runtime.h) and nothing about dtypes (the contracts). Next: bucket.h, runtime.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/text/printable.h"
#include "comm/stream.h"
#include "fsdp/agreed/controls.h"
#include "fsdp/agreed/order.h"
#include "fsdp/runtime/bucket.h"
#include "grad/leaf.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/recompute_mode.h"

namespace tessera::fsdp {

struct Parameter;

/// A leaf of a sharded module, which knows the parameter that it shows.
struct Leaf : grad::Leaf {
  Parameter* owner = nullptr;
};

/// The leaf that a tensor already is, or null.
inline std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor) {
  return std::static_pointer_cast<Leaf>(grad::find_leaf(tensor));
}

class Runtime;
class Unit;

/// One parameter of a unit. The shard tensor stays the same object for good; its data moves when
/// the unit is laid out anew. Whoever holds a view of it (ShardView) may outlive its unit.
struct Parameter : std::enable_shared_from_this<Parameter> {
  Parameter() = default;
  ~Parameter() { leave_unit(); }
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  GradContract contract;
  std::vector<std::shared_ptr<Leaf>> leaves;
  at::Tensor shard;                  ///< [owned], storage dtype: what optimizers see
  Unit* unit = nullptr;              ///< null once that is gone
  std::size_t bucket = 0;            ///< index into Unit::buckets
  std::size_t place = 0;             ///< index into the bucket plan's parameters
  std::vector<int> coordinates;      ///< of this rank on contract.layout.axes
  std::int64_t place_in_model = -1;  ///< as ShardView
  bool used = false;       ///< a gradient arrived here since gradients were last published
  bool published = false;  ///< shard.grad() is ours
  bool lost = false;       ///< a failure took it, and nobody has said that it may go
  at::Tensor seen_grad;    ///< shard.grad() as it was last looked at, and its version then
  std::uint32_t seen_version = 0;

  layout::Range owned() const;  ///< elements of the parameter in the shard
  const layout::Placed& placed() const;
  /// Its unit is gone, or it itself: nothing reaches either through the module's tensors any more.
  void leave_unit();
};

/// One buffer of a unit's module.
struct Buffer {
  BufferMeta meta;
  BufferContract contract;
  bool given = false;  ///< the contract comes from ShardOptions::buffer_contracts
  at::Tensor tensor;   ///< the module's own

  /// Its values in the storage dtype: as they were loaded, all digits, for as long as nobody wrote
  /// to what the cast made of them.
  at::Tensor stored() const;
  /// Its memory, once: the object that the module holds stays.
  void move_to(at::Device device) const;
  /// From the storage dtype, to the compute dtype. Errors: kUsage for another dtype; kContract.
  void cast();

  /// What the cast leaves: digits that it dropped would be missing in a checkpoint. Small: buffers
  /// are.
  struct Cast {
    at::Tensor exact;  ///< defined where it narrowed
    at::Tensor made;   ///< what it made; holds the memory, so that its address is no other's
  };
  std::shared_ptr<Cast> last_cast = std::make_shared<Cast>();  ///< one for all names of a tensor
};

/// An entry of what a unit's module registers, and its name in the model.
struct Registered {
  std::string name;                 ///< "" of a unit inside that was given a name of its own
  std::shared_ptr<Leaf> leaf = {};  ///< a parameter, of whichever unit
  at::Tensor buffer = {};           ///< or a buffer
  std::weak_ptr<const Unit> unit =
      {};  ///< or a unit inside; `name` is what stands before its names
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::string name, std::shared_ptr<Runtime> runtime, bool reshard_after_forward);
  ~Unit();

  const std::string& name() const { return contract.name; }
  /// For messages and labels: the outermost unit of a model has no name of its own.
  std::string shown_name() const { return std::string(unit_label(name())); }
  /// Puts `prefix` before the unit's and its parameters' names.
  void add_prefix(const std::string& prefix);

  /// Lays out `parameters` (each with leaves whose tensors hold the full values, or no data at all)
  /// into new buckets beside those that are there.
  void add(std::vector<std::shared_ptr<Parameter>> parameters);
  /// The parameters of bucket `index` with the full values back in their leaves; the bucket is
  /// gone. Collective.
  std::vector<std::shared_ptr<Parameter>> take_bucket(std::size_t index);

  const std::vector<std::shared_ptr<Parameter>>& parameters() const { return parameters_; }
  std::vector<std::unique_ptr<Bucket>>& buckets() { return buckets_; }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  Bucket& bucket_of(const Parameter& parameter) { return *buckets_[parameter.bucket]; }
  bool trainable() const;
  /// Calls `act(group)` once for each group that its buckets name, in the order in which they do: a
  /// group's buckets go out together, on every rank in this order. Null is the group of those that
  /// have nobody to share with.
  template <class Act>
  void for_groups(comm::Group* BucketGroups::* which, const Act& act) const {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      auto* group = buckets_[i]->groups().*which;
      std::size_t first = 0;
      while (buckets_[first]->groups().*which != group) ++first;
      if (first == i) act(group);
    }
  }

  /// Every parameter has values (loaded, initialized or from a full module).
  bool has_values() const { return has_values_; }
  void set_has_values() { has_values_ = true; }

  // --- called by the runtime ---
  bool gathered() const { return gathered_; }
  bool gather_pending() const { return !pending_.empty(); }
  /// Starts the gather; again into the same memory where it already is unsharded ([Note: collective
  /// order]: whether a collective is issued may not depend on what happened on this rank).
  void begin_gather(std::uint32_t micro_batch);
  void wait_gather();
  /// The current stream reads what is gathered: behind the gather, and before it is given back.
  void read_here() {
    if (gathered_) readers_.enter(comm::Stream::current(device()), comm::EventSite::kGather);
  }
  /// Of a gather under way this rank's shards are read: the current stream may write to them.
  void leave_shards() const;
  /// Errors: kUsage where somebody wrote to the parameters (the memory is given back all the same).
  void release();
  /// The sum of the shards' version counters: changes with every write to one of them.
  std::uint64_t weights_version() const;
  /// Casts buffers whose values are loaded to their compute dtype; again only after a new load.
  void cast_buffers();
  void forget_cast() { buffers_are_cast_ = false; }
  bool buffers_are_cast() const { return buffers_are_cast_; }
  /// Writes 1 to `mark`, [] of bytes, if it is unsharded, or about to be, with other values than
  /// this rank's shards hold now.
  void mark_stale(const at::Tensor& mark);
  void abandon_gather();  ///< after a failure: gives memory back without waiting for anything
  /// As a forward of the unit begins; renew_shared() as it ends, so that what the code around it
  /// does with leaves of its own is no further use of the same node. [Note: one leaf a use]
  void renew_accumulators();
  void renew_shared();
  /// For trainable parameters, from the next sum on. Nothing may be summed yet.
  void set_divide_factor(double factor);
  void set_unshard_in_backward(bool value);
  void join(const std::shared_ptr<Runtime>& runtime);
  Runtime& runtime() { return *runtime_; }
  const Runtime& runtime() const { return *runtime_; }
  /// Needs no gather: one rank that computes in its storage dtype.
  bool always_unsharded() const;

  /// Where a step of the model stands with it.
  struct Progress {
    int open_calls = 0;              ///< forwards on the stack
    int tickets = 0;                 ///< deferred gradients that are owed
    bool reduced = false;            ///< in this backward
    bool pending = false;            ///< a backward without sync left gradients in its slots
    bool unpublished = false;        ///< reduced since its gradients were last published
    bool unsharded_by_user = false;  ///< kept until the user or a forward gives it back
    bool gathered_again = false;     ///< before its backward, by a forward that is repeated
    bool ran_without_grad = false;   ///< in its last forward
  };
  const Progress& progress() const { return progress_; }
  /// Recorded forwards whose backward is not finished.
  int expected() const { return *expected_; }
  /// Its memory outlasts backwards.
  bool keeps_unsharded_after_backward() const {
    return progress_.unsharded_by_user || !controls.reshard_after_backward;
  }
  UnitId id() const { return id_; }  ///< in plan order, the same on every rank
  bool has_handle() const { return has_handle_; }

  // --- called by its buckets ---
  /// Whether a forward of it waits for its backward, or gradients of it are deferred.
  bool expects_gradients() const { return expected() > 0 || progress_.tickets > 0; }
  /// Notes the current stream as one that reads its gathered memory.
  void note_reader() {
    if (gathered_) readers_.note(comm::Stream::current(device()));
  }
  void tickets_changed(int delta);

  UnitContract contract;  ///< its name, and what a call casts
  std::vector<Buffer> buffers;
  /// In the order of the modules, each in every place where it stands; empty where the contracts
  /// came with the names (ShardOptions::contracts).
  std::vector<Registered> registered;

  UnitControls controls;
  /// What is gathered while it computes; empty: the agreed order.
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;
  const void* module = nullptr;  ///< what the handle holds, to know it again
  /// The same, where it is one and has no units inside: plans may tell it.
  std::weak_ptr<Recomputable> recomputable;
  /// Units that hold some of this module's parameters, which live at least as long as this one.
  std::vector<std::shared_ptr<Unit>> owners;
  bool shares_of(const Unit& other) const {
    return std::any_of(owners.begin(), owners.end(),
                       [&](const auto& owner) { return owner.get() == &other; });
  }
  std::vector<std::shared_ptr<Leaf>> owned_elsewhere;  ///< leaves that another unit owns

  std::unique_ptr<Bucket> make_bucket(const layout::BucketPlan& plan);  ///< empty
  std::string released_message() const;  ///< of accesses to parameters that are not unsharded

 private:
  friend class Runtime;
  friend class Publisher;

  void build(std::vector<std::shared_ptr<Parameter>> parameters);
  void give_memory_back();
  void end_gather();
  at::Device device() const;

  std::shared_ptr<Runtime> runtime_;
  Progress progress_;
  std::shared_ptr<std::atomic<int>> expected_ = std::make_shared<std::atomic<int>>(0);
  UnitId id_ = 0;
  bool has_handle_ = true;  // false once that is gone
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  /// Of one group's buckets.
  void begin_gather(comm::Group* group, std::uint32_t micro_batch);

  std::vector<comm::Pending> pending_;  // one a group
  // Of a device:
  std::vector<comm::Event> filled_;  // behind what this rank sends, of pending_
  comm::Uses readers_;               // of the gathered memory
  bool gathered_ = false;
  bool has_values_ = true;
  bool buffers_are_cast_ = false;
};

/// The unit of a handle that was not moved from. Errors: kUsage.
Unit& unit_of_handle(const std::shared_ptr<Unit>& unit);

}  // namespace tessera::fsdp
