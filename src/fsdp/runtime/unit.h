// Unit: the parameters that are gathered and reduced together, usually a block.
//
// A unit owns its parameters, leaves and buckets, and lays them out. It decides nothing about the
// order of collectives (runtime.h) and nothing about dtypes (the contracts). Next: bucket.h,
// runtime.h.
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

/// Returns the leaf that the tensor already is, or null.
inline std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor) {
  return std::static_pointer_cast<Leaf>(grad::find_leaf(tensor));
}

class Runtime;
class Unit;

/// One parameter of a unit. Its shard is the same tensor object for good; the shard's data moves
/// when the unit is laid out again. A view of the parameter (ShardView) may outlive its unit.
struct Parameter : std::enable_shared_from_this<Parameter> {
  Parameter() = default;
  ~Parameter() { leave_unit(); }
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  GradContract contract;
  std::vector<std::shared_ptr<Leaf>> leaves;
  at::Tensor shard;                  ///< [owned], storage dtype; optimizers update it
  Unit* unit = nullptr;              ///< null once the unit is gone
  std::size_t bucket = 0;            ///< index into Unit::buckets
  std::size_t place = 0;             ///< index into the bucket plan's parameters
  std::vector<int> coordinates;      ///< this rank's, on contract.layout.axes
  std::int64_t place_in_model = -1;  ///< see ShardView
  bool used = false;       ///< a gradient arrived here since gradients were last published
  bool published = false;  ///< the runtime has set shard.grad()
  bool lost = false;       ///< a failure lost its gradient, and zero_grad() was not called since
  at::Tensor seen_grad;    ///< shard.grad() as record_published() found it, and its version
  std::uint32_t seen_version = 0;

  layout::Range owned() const;  ///< elements of the parameter in the shard
  const layout::Placed& placed() const;
  /// Detaches the module's tensors from the parameter when the parameter or its unit is destroyed.
  void leave_unit();
};

/// One buffer of a unit's module.
struct Buffer {
  BufferMeta meta;
  BufferContract contract;
  bool given = false;  ///< whether the contract is from ShardOptions::buffer_contracts
  at::Tensor tensor;   ///< the tensor of the module

  /// Returns the values in the storage dtype: as they were loaded, in full precision, as long as
  /// nothing has been written to the result of the cast.
  at::Tensor stored() const;
  /// Moves its memory to the device; the tensor object that the module holds stays the same.
  void move_to(at::Device device) const;
  /// Casts it from the storage dtype to the compute dtype. Errors: kUsage where it has neither
  /// dtype; kContract for a finite value that the cast would make infinite.
  void cast();

  /// The last cast, with the values before it: a checkpoint stores those, since the cast loses
  /// digits. Buffers are small.
  struct Cast {
    at::Tensor exact;  ///< the values before the cast; undefined where the cast lost no digits
    at::Tensor made;   ///< the result; holds the memory, so that its address stays unique
  };
  std::shared_ptr<Cast> last_cast = std::make_shared<Cast>();  ///< shared by all names of a tensor
};

/// A parameter, a buffer or an inner unit that a unit's module registers.
struct Registered {
  std::string name;                     ///< in the model; "" for a named inner unit
  std::shared_ptr<Leaf> leaf = {};      ///< a parameter, of any unit
  at::Tensor buffer = {};               ///< or a buffer
  std::weak_ptr<const Unit> unit = {};  ///< or an inner unit; `name` prefixes its names
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::string name, std::shared_ptr<Runtime> runtime, bool reshard_after_forward);
  ~Unit();

  const std::string& name() const { return contract.name; }
  /// Returns the name for messages and labels, since the outermost unit of a model has no name.
  std::string shown_name() const { return std::string(unit_label(name())); }
  /// Puts `prefix` before the unit's and its parameters' names.
  void add_prefix(const std::string& prefix);

  /// Lays out `parameters` in new buckets, in addition to the present ones. The tensors of their
  /// leaves hold the full values, or no data at all.
  void add(std::vector<std::shared_ptr<Parameter>> parameters);
  /// Removes bucket `index` and returns its parameters, with the full values in their leaves again.
  /// Collective.
  std::vector<std::shared_ptr<Parameter>> take_bucket(std::size_t index);

  const std::vector<std::shared_ptr<Parameter>>& parameters() const { return parameters_; }
  std::vector<std::unique_ptr<Bucket>>& buckets() { return buckets_; }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  Bucket& bucket_of(const Parameter& parameter) { return *buckets_[parameter.bucket]; }
  bool trainable() const;
  /// Calls `act(group)` once for each group that its buckets name, in the order of the buckets. The
  /// collectives of a group's buckets are issued together, on every rank in this order. Buckets
  /// that no other rank shares have a null group.
  template <class Act>
  void for_groups(comm::Group* BucketGroups::* which, const Act& act) const {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      auto* group = buckets_[i]->groups().*which;
      std::size_t first = 0;
      while (buckets_[first]->groups().*which != group) ++first;
      if (first == i) act(group);
    }
  }

  /// Whether every parameter has values (loaded, initialized or from a full module).
  bool has_values() const { return has_values_; }
  void set_has_values() { has_values_ = true; }

  // --- called by the runtime ---
  bool gathered() const { return gathered_; }
  bool gather_pending() const { return !pending_.empty(); }
  /// Starts the gather. Where the unit is unsharded already, it gathers again into the same memory:
  /// whether a collective is issued may not depend on what happened on this rank ([Note: collective
  /// order]).
  void begin_gather(std::uint32_t micro_batch);
  void wait_gather();
  /// Notes that the current stream reads the gathered memory: its reads are ordered after the
  /// gather and before the release.
  void read_here() {
    if (gathered_) readers_.enter(comm::Stream::current(device()), comm::EventSite::kGather);
  }
  /// Orders the current stream after the reads of this rank's shards by a gather that is under way,
  /// so that the stream may write to these shards.
  void leave_shards() const;
  /// Frees the gathered memory. Errors: kUsage where the parameters were written to (the memory is
  /// freed all the same).
  void release();
  /// The sum of the shards' version counters: changes with every write to one of them.
  std::uint64_t weights_version() const;
  /// Casts buffers whose values are loaded to their compute dtype, once after each load.
  void cast_buffers();
  void forget_cast() { buffers_are_cast_ = false; }
  bool buffers_are_cast() const { return buffers_are_cast_; }
  /// Writes 1 to `mark` (one byte, []) if the unit is unsharded, or about to be, with values that
  /// differ from this rank's shards.
  void mark_stale(const at::Tensor& mark);
  void abandon_gather();  ///< after a failure: frees memory without waiting
  /// Gives every leaf a new AccumulateGrad node, when a forward of the unit begins. [Note: one leaf
  /// a use]
  void renew_accumulators();
  /// Gives new AccumulateGrad nodes to the leaves that other units own, when a forward ends: a
  /// later use of such a leaf outside of the unit is not another use of the same node.
  void renew_shared();
  /// Sets the factor by which later sums of gradients are divided. Nothing may be summed yet.
  void set_divide_factor(double factor);
  void set_unshard_in_backward(bool value);
  void join(const std::shared_ptr<Runtime>& runtime);
  Runtime& runtime() { return *runtime_; }
  const Runtime& runtime() const { return *runtime_; }
  /// Whether it needs no gather: one rank that computes in its storage dtype.
  bool always_unsharded() const;

  /// The state of the unit in the step under way.
  struct Progress {
    int open_calls = 0;              ///< forwards on the stack
    int tickets = 0;                 ///< deferred gradients that are not formed yet
    bool reduced = false;            ///< in this backward
    bool pending = false;            ///< a backward without sync left gradients in its slots
    bool unpublished = false;        ///< reduced since its gradients were last published
    bool unsharded_by_user = false;  ///< kept until the user or a forward reshards it
    bool gathered_again = false;     ///< before its backward, by a forward that is repeated
    bool ran_without_grad = false;   ///< in its last forward
  };
  const Progress& progress() const { return progress_; }
  /// Recorded forwards whose backward is not finished.
  int expected() const { return *expected_; }
  /// Whether it stays unsharded after a backward.
  bool keeps_unsharded_after_backward() const {
    return progress_.unsharded_by_user || !controls.reshard_after_backward;
  }
  UnitId id() const { return id_; }  ///< in plan order, the same on every rank
  bool has_handle() const { return has_handle_; }

  // --- called by its buckets ---
  /// Whether a forward waits for its backward, or gradients are deferred.
  bool expects_gradients() const { return expected() > 0 || progress_.tickets > 0; }
  /// Notes the current stream as one that reads its gathered memory.
  void note_reader() {
    if (gathered_) readers_.note(comm::Stream::current(device()));
  }
  void tickets_changed(int delta);

  UnitContract contract;  ///< its name, and the casts of a call
  std::vector<Buffer> buffers;
  /// All that the unit's modules register, in their order; a tensor that is registered in several
  /// places is listed for each. Empty where ShardOptions::contracts gives the names.
  std::vector<Registered> registered;

  UnitControls controls;
  /// The units that are gathered while this one computes; empty: those that follow in the agreed
  /// order.
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;
  const void* module = nullptr;  ///< the module of the handle, for comparisons
  /// The module, where it is Recomputable and has no units inside: plans may choose its mode.
  std::weak_ptr<Recomputable> recomputable;
  /// Units that own some of this module's parameters; they live at least as long as this one.
  std::vector<std::shared_ptr<Unit>> owners;
  bool has_owner(const Unit& other) const {
    return std::any_of(owners.begin(), owners.end(),
                       [&](const auto& owner) { return owner.get() == &other; });
  }
  std::vector<std::shared_ptr<Leaf>> owned_elsewhere;  ///< leaves that another unit owns

  std::unique_ptr<Bucket> make_bucket(const layout::BucketPlan& plan);  ///< without values
  std::string released_message() const;  ///< for accesses to parameters that are sharded

 private:
  friend class Runtime;
  friend class Publisher;

  void build(std::vector<std::shared_ptr<Parameter>> parameters);
  void free_memory();
  void end_gather();
  at::Device device() const;

  std::shared_ptr<Runtime> runtime_;
  Progress progress_;
  std::shared_ptr<std::atomic<int>> expected_ = std::make_shared<std::atomic<int>>(0);
  UnitId id_ = 0;
  bool has_handle_ = true;  // false once the handle is destroyed
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  /// Starts the gather of one group's buckets.
  void begin_gather(comm::Group* group, std::uint32_t micro_batch);

  std::vector<comm::Pending> pending_;  // one for each group
  // On a device:
  std::vector<comm::Event> filled_;  // by pending_: after the reads of this rank's shards
  comm::Uses readers_;               // streams that use the gathered memory
  bool gathered_ = false;
  bool has_values_ = true;
  bool buffers_are_cast_ = false;
};

/// Returns the unit of a handle. Errors: kUsage where the handle was moved from.
Unit& unit_of_handle(const std::shared_ptr<Unit>& unit);

}  // namespace tessera::fsdp
