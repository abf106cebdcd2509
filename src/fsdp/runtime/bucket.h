// Bucket: the flat buffers of those parameters of a unit that have the same dtypes and reductions.
//
// The plan (layout/bucket_plan.h) says where each parameter lies; this class owns the bytes: the
// shard, the gather buffer, the gradient slots while gradients arrive, and the shard's accumulator.
// It prepares and finishes collectives but starts none: runtime.h does, in the agreed order. It
// owns the slots of its parameters, which gradients reach through the sink (grad/sink.h). With one
// rank in the shard group the slots *are* the accumulator and nothing is copied.
//
//   memory       elements  dtype       the same memory as
//   shard        [slice]   storage
//   gather       [numel]   compute     the shard: one rank, and storage is compute
//   slots        [numel]   accumulate  the accumulator: one rank
//   wire         [numel]   reduce      the slots: accumulate is reduce
//   accumulator  [slice]   accumulate
//   replica sum  [slice]   accumulate  none: no replicas
//   final        [slice]   final       the accumulator or the replica sum: no division and no cast
//
// A collective is prepared by the host first (begin_...: memory, the operation), then its buffer is
// filled by kernels (fill_...). On a device these kernels run on the stream of the group that sends
// the buffer, while the rank computes. So memory is taken for that stream, and a reduction waits
// for all streams that added gradients (submit()). On the CPU the rank's thread fills the buffer,
// then submits it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/group.h"
#include "comm/queue.h"
#include "comm/stream.h"
#include "grad/sink.h"
#include "layout/bucket_plan.h"
#include "tessera/mesh.h"

namespace tessera::fsdp {

/// The groups that a bucket communicates on; null where the axis has one rank.
struct BucketGroups {
  comm::Group* gather = nullptr;
  comm::Group* reduce = nullptr;
  comm::Group* replicas = nullptr;  ///< includes stages with ReductionPlan::copies
};

/// The groups of a bucket, and this rank's index among the ranks that share it.
struct AxesGroups {
  BucketGroups groups;
  comm::Group* control = nullptr;  ///< same ranks as `gather`, for the rank's thread
  int rank = 0;
  int ranks = 1;
};

struct Parameter;
class Unit;

class Bucket : public grad::SlotOwner {
 public:
  /// `unit` outlives the bucket.
  Bucket(Unit& unit, layout::BucketPlan plan, BucketGroups groups, int rank);
  ~Bucket() override;  ///< on a device, returns its memory to the pool (buffer_pool.h)
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  const layout::BucketPlan& plan() const { return plan_; }
  const BucketGroups& groups() const { return groups_; }
  bool trainable() const { return plan_.key.trainable; }
  int rank() const { return rank_; }
  /// Its index among its unit's buckets.
  void set_number(std::size_t number) { number_ = static_cast<std::uint32_t>(number); }

  // --- parameters ---
  /// Names the parameter whose gradients arrive in slot `index`.
  void set_parameter(std::size_t index, Parameter& parameter);
  const at::Tensor& shard() const { return shard_; }        ///< [slice], storage dtype
  at::Tensor shard_of(const layout::Placed& placed) const;  ///< [owned], a view of shard()
  comm::GatherBuffer& unsharded() { return unsharded_; }
  const comm::GatherBuffer& unsharded() const { return unsharded_; }
  /// Whether the unsharded parameters are the shard itself: one rank that computes in the storage
  /// dtype.
  bool aliases_shard() const { return aliases_shard_; }
  /// Takes memory, and adds the collective to `batch` where other ranks share the bucket.
  void begin_gather(comm::Batch& batch);
  /// Writes this rank's slice, cast to the compute dtype.
  void fill_gather() const;
  /// Writes 1 to `mark` (one byte, []) where the gathered values differ from this rank's shard.
  /// Values are compared, since version counters do not see every write.
  void mark_stale(const at::Tensor& mark) const;
  /// Returns the collective of a gather into the memory that the bucket has already.
  comm::AllGather gather() const;

  // --- gradients: the slots of plan().parameters, by index (grad/sink.h) ---
  View open_slot(std::size_t index) override;
  /// Shares the slot with one caller at a time, until end_share().
  at::Tensor share_slot(std::size_t index) override;
  void end_share(std::size_t index, bool arrived) override;
  void tickets_changed(int delta) override;
  /// Whether a reduction is under way.
  bool is_reducing() const { return wire_.defined(); }
  /// Whether a gradient arrived since the last reduction, for any parameter or for that of `index`.
  bool has_arrivals() const;
  bool has_arrivals(std::size_t index) const { return arrived_[index] != 0; }
  /// Adds to `batch` the reduction whose sum goes to the accumulator. Where no other rank shares
  /// the bucket, makes the sum at once. No slot may be opened before finish_reduce(). Returns the
  /// bytes that stay in use until then.
  std::int64_t begin_reduce(comm::Batch& batch);
  /// Zeroes the slots in which nothing arrived, and casts to the wire's dtype.
  void fill_reduce();
  /// Returns the wire to the pool: it is free once the current stream has done its work so far.
  void finish_reduce();

  /// The sum over ranks and micro-batches so far: [slice], accumulation dtype, zeros where nothing
  /// arrived.
  const at::Tensor& accumulator() const { return accumulator_; }
  /// Starts a new sum for the parameter: zeroes its range and discards what is in its slot.
  void reset_accumulator(std::size_t index);
  /// Starts new sums for all parameters. On a device, and after Runtime::free_gradients(), frees
  /// the memory of the sums and of the gradients published from them.
  void reset_accumulator();
  /// Replaces the parameter's sum and what is in its slot by `value` ([owned], already times the
  /// divide factor) on this rank.
  void import_accumulator(std::size_t index, const at::Tensor& value);
  bool has_sum() const { return has_sum_; }
  /// Moves the sum to other memory, since the user keeps gradients that were published in this one.
  /// Nothing may be under way.
  void leave_accumulator();

  /// Adds the sum over replicas to `batch`. The sum goes to other memory, so that later
  /// micro-batches can add to the partial sum.
  void begin_replica_reduce(comm::Batch& batch);
  void fill_replica_reduce() const;
  void finish_replica_reduce() { finish_reduce(); }
  /// Returns the final gradient, [slice] in the final dtype: the sum, also over replicas, divided
  /// by the divide factor and the loss scale and rounded once (kernels.h). Where that changes
  /// nothing, returns the accumulator itself; else final_memory(), which each step uses again.
  const at::Tensor& finish_final(double loss_scale);
  /// The memory that finish_final() writes; undefined before it has written any.
  const at::Tensor& final_memory() const { return final_; }
  /// Makes finish_final() write to other memory from now on, for the reason of leave_accumulator().
  void leave_final_memory();
  /// The last result of finish_final().
  const at::Tensor& final_gradient() const { return final_is_accumulator_ ? accumulator_ : final_; }
  /// Whether finish_final() returned the accumulator itself.
  bool final_is_accumulator() const { return final_is_accumulator_; }

  /// Sets the divide factor of later sums. There must be no sum yet.
  void set_divide_factor(double factor);

  /// Takes memory from `pool` from now on: the unit joins another runtime. Nothing may be under
  /// way.
  void use_pool(const std::shared_ptr<comm::BufferPool>& pool);

  void drop_gradients();  ///< after an exception: frees buffers, forgets partial sums

 private:
  void expect_gradient(std::size_t index);
  void note_arrival(std::size_t index);
  void ensure_slots();
  at::Tensor slot(std::size_t index) const;
  bool is_empty(std::size_t index) const;
  bool is_shared(std::size_t index) const;
  void add_here(std::size_t index);  ///< notes that the current stream writes to the slot
  void ensure_accumulator();
  comm::Stream current_stream() const { return comm::Stream::current(pool_->device()); }
  /// Makes memory that the bucket keeps. On a device it is allocated on the stream made_on_.
  at::Tensor make(std::int64_t numel, DType dtype) const;
  /// Orders the current stream after all streams that added to the slots. Called before the sums
  /// are used, since they may lie in the slots.
  void join_slots();
  /// Zeroes in `slots` the gaps between parameters, and the parameters for which nothing arrived.
  void zero_what_did_not_arrive(const at::Tensor& slots) const;
  /// Writes the shard into `slice`, in the compute dtype.
  void encode(const at::Tensor& slice) const;
  bool sum_is_final() const;  ///< apart from the loss scale
  bool frees_sums() const;

  Unit& unit_;
  layout::BucketPlan plan_;
  std::vector<Parameter*> parameters_;  // in the order of plan_.parameters
  BucketGroups groups_;
  int rank_;
  std::uint32_t number_ = 0;
  std::shared_ptr<comm::BufferPool> pool_;
  bool aliases_shard_ = false;
  bool final_is_accumulator_ = false;  // in the last finish_final()
  at::Tensor shard_;
  comm::GatherBuffer unsharded_;
  at::Tensor slots_;                   // [numel], accumulate dtype, while gradients arrive
  at::Tensor wire_;                    // reduce dtype, while a reduction is under way: [numel], or
                                       // [slice] over replicas
  std::vector<std::uint8_t> arrived_;  // per parameter, since the last reduction
  std::vector<std::size_t> shared_slots_;  // indices of slots that kernels are writing
  comm::Stream made_on_;                   // device only, as the next two:
  comm::Uses slot_uses_;                   // streams that use the slots' memory
  std::vector<comm::Stream> added_on_;     // per parameter: the stream of its last gradient
  at::Tensor accumulator_;                 // [slice], accumulate dtype
  bool has_sum_ = false;    // accumulator_ holds a sum (else it is to be overwritten)
  at::Tensor replica_sum_;  // [slice], accumulate dtype, where there are replicas
  at::Tensor final_;        // [slice], final dtype: is replica_sum_ where that has the dtype
};

/// Submits the batch once `fill` has run, on the group's stream where it has one, else on this
/// thread.
comm::Pending submit(comm::IssueQueue& queue, comm::Group& group, comm::Batch batch,
                     std::function<void()> fill);

/// The groups on which the ranks of one sharded tree communicate, by purpose. They are ordinary
/// groups of a World (tessera/world.h).
class Groups {
 public:
  /// Collective among the ranks of the mesh.
  explicit Groups(Mesh mesh);

  const Mesh& mesh() const { return mesh_; }
  World& world() const { return *mesh_.world(); }
  /// Returns the groups of buckets with this key. The first call for the axes of a key is
  /// collective among their ranks.
  AxesGroups of(const layout::BucketKey& key);
  // The groups below are null where they would have one rank.
  comm::Group* data() const { return data_.get(); }  ///< all ranks of the stage, for control
  /// The ranks of one replica: for control, and for gathers in the queue.
  comm::Group* replica_control() const { return replica_control_.get(); }
  comm::Group* replica_gathers() const { return replica_gathers_.get(); }
  comm::Group* replicas() const { return replicas_.get(); }  ///< the replicas of one shard
  comm::Group* stages() const { return stages_.get(); }      ///< all stages, for control

 private:
  const Mesh mesh_;
  struct Of {
    std::vector<std::string> shard_axes;
    std::vector<int> copies;
    AxesGroups groups;
  };
  std::vector<Of> known_;
  std::shared_ptr<comm::Group> data_, replica_control_, replica_gathers_, replicas_, stages_;
};

}  // namespace tessera::fsdp
