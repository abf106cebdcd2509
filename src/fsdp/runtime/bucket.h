// Bucket: the flat buffers of the parameters of one unit that share all dtypes and reductions.
//
// The plan (layout/bucket_plan.h) says where each parameter lies; this class owns the bytes: the
// shard, the gather buffer, the gradient slots while gradients arrive, and the shard's accumulator.
// It prepares and finishes collectives but starts none: runtime.h does, in the agreed order. It
// owns the slots of its parameters, which gradients reach through the sink (grad/sink.h). With one
// rank in the shard group the slots *are* the accumulator and nothing is copied.
//
// What goes out is prepared by the host first (memory, the collective: begin_...), then filled by
// kernels (fill_...). On a device these run on the stream of the group that sends it, beside what
// the rank computes: so memory is taken for that stream, and a reduction waits for all streams that
// added gradients (submit()). On the CPU one follows the other.
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
  comm::Group* replicas = nullptr;  ///< and copies of other stages (ReductionPlan::copies)
};

/// The same with this rank's place on the axes that the bucket lies over.
struct AxesGroups {
  BucketGroups groups;
  comm::Group* control = nullptr;  ///< of the same ranks as gathers, from the rank's own thread
  int rank = 0;
  int ranks = 1;
};

struct Parameter;
class Unit;

class Bucket : public grad::SlotOwner {
 public:
  /// `unit` outlives the bucket.
  Bucket(Unit& unit, layout::BucketPlan plan, BucketGroups groups, int rank);
  ~Bucket() override;  ///< on a device what is taken from the pool goes back: buffer_pool.h
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
  /// One rank that computes in the storage dtype: the unsharded parameters are the shard.
  bool aliases_shard() const { return aliases_shard_; }
  /// Takes memory and adds the collective, if there is one to run, to `batch`.
  void begin_gather(comm::Batch& batch);
  /// Writes this rank's slice, cast to the compute dtype.
  void fill_gather() const;
  /// Writes 1 to `mark`, [] of bytes, where what is gathered is not this rank's shard as it stands
  /// now: compared by value, since not every write is seen by version counters.
  void mark_stale(const at::Tensor& mark) const;
  /// The collective again, into the memory that is there.
  comm::AllGather gather() const;

  // --- gradients: the slots of plan().parameters, by index ---
  View open_slot(std::size_t index) override;
  /// The slot is shared to one caller at a time, until end_loan().
  at::Tensor share_slot(std::size_t index) override;
  void end_loan(std::size_t index, bool arrived) override;
  void tickets_changed(int delta) override;
  /// A reduction is under way.
  bool is_reducing() const { return wire_.defined(); }
  /// Whether any gradient arrived since the last reduction, or one of plan().parameters[index].
  bool has_arrivals() const;
  bool has_arrivals(std::size_t index) const { return arrived_[index] != 0; }
  /// Adds the reduction into the accumulator to `batch`; without ranks to share with the sum is
  /// made. No slot may be opened before
  /// finish_reduce(). Returns the bytes that stay busy until then.
  std::int64_t begin_reduce(comm::Batch& batch);
  /// Zeroes what never arrived; casts to the wire's dtype. Of a bucket that reduces.
  void fill_reduce();
  /// The wire is free from here on of the current stream.
  void finish_reduce();

  /// Sum over ranks and micro-batches so far, [slice] in the accumulation dtype; zeros where
  /// nothing arrived.
  const at::Tensor& accumulator() const { return accumulator_; }
  /// Starts a new sum for the parameter: its range reads as zero, what waits in its slot is gone.
  void reset_accumulator(std::size_t index);
  /// For all of them; its memory goes back, with what was published from it, on a device and where
  /// the runtime says so.
  void reset_accumulator();
  /// Replaces the parameter's sum, with what waits in its slot, by `value` ([owned], already times
  /// the divide factor) on this rank.
  void import_accumulator(std::size_t index, const at::Tensor& value);
  bool has_sum() const { return has_sum_; }
  /// The sum goes on in other memory: somebody keeps what was published in this. Nothing may be
  /// under way.
  void leave_accumulator();

  /// Adds the sum over replicas to `batch`, out of place, so that later micro-batches can add to
  /// the partial.
  void begin_replica_reduce(comm::Batch& batch);
  void fill_replica_reduce() const;
  void finish_replica_reduce() { finish_reduce(); }
  /// [slice] in the final dtype: the accumulated (and replica-summed) gradient over the divide
  /// factor and the loss scale, rounded once (kernels.h). Aliases the accumulator where nothing
  /// has to change; else the memory of the last step.
  const at::Tensor& finish_final(double loss_scale);
  /// Where it writes what is not the accumulator itself; undefined until it has.
  const at::Tensor& final_memory() const { return final_; }
  /// It writes to other memory from now on, as leave_accumulator().
  void leave_final_memory();
  /// What finish_final() made last.
  const at::Tensor& final_gradient() const { return final_is_accumulator_ ? accumulator_ : final_; }
  /// Whether finish_final() returned the accumulator itself.
  bool final_is_accumulator() const { return final_is_accumulator_; }

  /// From the next sum on. There must be none.
  void set_divide_factor(double factor);

  /// Its unit joined another runtime: memory comes from that one's pool. Nothing may be under way.
  void use_pool(const std::shared_ptr<comm::BufferPool>& pool);

  void drop_gradients();  ///< after an exception: gives buffers back, forgets partial sums

 private:
  void expect_gradient(std::size_t index);
  void note_arrival(std::size_t index);
  void ensure_slots();
  at::Tensor slot(std::size_t index) const;
  bool is_empty(std::size_t index) const;
  bool is_lent(std::size_t index) const;
  void add_here(std::size_t index);  ///< the current stream writes to a slot
  void ensure_accumulator();
  comm::Stream current_stream() const { return comm::Stream::current(pool_->device()); }
  /// For good, on the device: of the stream that the bucket was made on, in the allocator's eyes.
  at::Tensor make(std::int64_t numel, DType dtype) const;
  /// Before the current stream looks at the sums where they are the slots as well.
  void join_slots();
  /// Gaps between parameters, and slots of `slots` that nothing arrived in.
  void zero_what_did_not_arrive(const at::Tensor& slots) const;
  /// Writes the shard into `slice`, in the compute dtype.
  void encode(const at::Tensor& slice) const;
  bool sum_is_final() const;  ///< but for the loss scale
  bool gives_sums_back() const;

  Unit& unit_;
  layout::BucketPlan plan_;
  std::vector<Parameter*> parameters_;  // as plan_.parameters
  BucketGroups groups_;
  int rank_;
  std::uint32_t number_ = 0;
  std::shared_ptr<comm::BufferPool> pool_;
  bool aliases_shard_ = false;
  bool final_is_accumulator_ = false;  // as of the last finish_final()
  at::Tensor shard_;
  comm::GatherBuffer unsharded_;
  at::Tensor slots_;                    // [numel], accumulate dtype, while gradients arrive
  at::Tensor wire_;                     // reduce dtype, while a reduction is under way: [numel], or
                                        // [slice] between replicas
  std::vector<std::uint8_t> arrived_;   // per parameter, since the last reduction
  std::vector<std::size_t> lent_;       // whose slots kernels are writing
  comm::Stream made_on_;                // of a device, as all of these:
  comm::Uses slot_uses_;                // of the slots' memory
  std::vector<comm::Stream> added_on_;  // per parameter, its last gradient
  at::Tensor accumulator_;              // [slice], accumulate dtype
  bool has_sum_ = false;                // accumulator_ holds a sum (else it is to be overwritten)
  at::Tensor replica_sum_;              // [slice], accumulate dtype, where there are replicas
  at::Tensor final_;  // [slice], final dtype: the replica sum where it has that dtype, else its own
};

/// The batch, behind `fill`: on the group's stream where it has one, else here before.
comm::Pending submit(comm::IssueQueue& queue, comm::Group& group, comm::Batch batch,
                     std::function<void()> fill);

/// On what the ranks of one sharded tree communicate: ordinary members of a World's groups
/// (tessera/world.h), by what they are for.
class Groups {
 public:
  /// Collective among the ranks of the mesh.
  explicit Groups(Mesh mesh);

  const Mesh& mesh() const { return mesh_; }
  World& world() const { return *mesh_.world(); }
  /// What buckets of these axes communicate on. The first time: collective among those ranks.
  AxesGroups of(const layout::BucketKey& key);
  /// Null where there is one rank, all of these:
  comm::Group* data() const { return data_.get(); }  ///< all ranks of the pipeline stage, control
  /// The ranks of one replica: control, and gathers in the queue.
  comm::Group* replica_control() const { return replica_control_.get(); }
  comm::Group* replica_gathers() const { return replica_gathers_.get(); }
  comm::Group* replicas() const { return replicas_.get(); }  ///< of one shard
  comm::Group* stages() const { return stages_.get(); }      ///< of a pipeline, control

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
