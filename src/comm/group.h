// Collectives among the ranks of one group: the interface that a backend implements (gloo,
// in-process, nccl), and the blocking forms for control messages.
//
// This is no general message layer: it has only what sharding needs, with the semantics that it
// needs. Sums are formed in rank order in the output's dtype, so that every backend gives the same
// bits; an all-gather is in place. Every call carries a Label, and a backend never lets two calls
// with different labels meet (Gloo itself exchanges their data without an error: [Note: collective
// order] of fsdp/agreed/order.h). Threads: only one thread issues to a group.
//
// [Note: groups on devices] A group of tensors on a device owns a stream, on which its collectives
// run in the order of their issue; groups of the same ranks share it. issue() orders it after the
// caller's current stream, so what was launched there before is what is sent. wait() orders the
// caller's stream after the collective. Neither blocks the host: what is launched after wait()
// reads the result. On the CPU, and in a group of one rank, there is no stream. Next: queue.h.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/doing.h"
#include "comm/ops/all_gather.h"
#include "comm/ops/all_reduce.h"
#include "comm/ops/all_to_all.h"
#include "comm/ops/broadcast.h"
#include "comm/ops/reduce_scatter.h"
#include "comm/ops/relayed.h"
#include "comm/stream.h"
#include "launch/order_log.h"

namespace tessera {
class World;
}

namespace tessera::comm {

class HostWaits;
class P2P;

/// Which pass of a micro-batch a collective of activations belongs to.
enum class ActivationPass : std::uint8_t { kNone, kForward, kBackward, kRecomputed };
std::string_view to_string(ActivationPass pass);  ///< "": none

/// Names the caller of a batch: compared over ranks, printed when ranks disagree.
struct Label {
  Kind kind = Kind::kBatch;
  std::string unit;           ///< "model.layers.3", "control", ...
  std::uint32_t unit_id = 0;  ///< the same on every rank
  std::uint32_t micro_batch = 0;
  /// Runtime controls that differ from their defaults, as text: ranks that set them differently
  /// find out here.
  std::string controls = {};
  /// The pass and the stage of a collective of activations. Its unit is the layer's name for it,
  /// which is the same for all layers.
  ActivationPass activations = ActivationPass::kNone;
  int stage = UnitHere::kNoStage;  ///< of this rank
  // For reports, not compared:
  /// The unit in whose forward or backward a module issues it.
  std::string within = {};
  Pass pass = Pass::kForward;  ///< the pass in which it is issued
};

/// A variant of operations: a type that does not model Operation does not compile here.
template <Operation... Each>
using OneOf = std::variant<Each...>;
using Op = OneOf<AllGather, ReduceScatter, AllReduce, AllToAll, Broadcast, RelayedGather, Combine>;

/// Returns Operation's first_tensor().
const at::Tensor& first_tensor(const Op& op);

/// The collectives of one unit on one group, which are issued together.
struct Batch {
  Label label;
  std::vector<Op> ops;
  std::int64_t bytes() const;  ///< sum of the full buffers
};

/// A batch in flight. wait() may be called repeatedly, from one thread at a time; it does the work
/// that is left (the additions of a reduce-scatter). On a device it makes the caller's current
/// stream wait, and the host at most until all ranks have issued. A caller may destroy the Work
/// before it has ended; the destructor does not wait. The memory of its tensors is then free only
/// after the batch: their stream is ordered after it, at the latest when all ranks have issued.
/// Errors: kComm with the label, and the peers waited for.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
};

/// Notes in the label that a backward runs on this thread, where one does.
void note_pass(Label& label);

class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;  ///< within the group
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  /// Whether no other rank exists (dry_world.h): what this rank has sent is received from all
  /// others.
  virtual bool is_dry() const { return false; }
  /// Starts all ops of the batch on the group's stream, after `ready` has filled what is sent. A
  /// group of one rank completes at once without a copy beyond what the op's output requires.
  /// Collective.
  std::unique_ptr<Work> issue(Batch batch, const std::function<void()>& ready = {}) {
    note_pass(batch.label);
    if (stream_) return issue_on_stream(std::move(batch), ready);
    if (ready) ready();
    return start(std::move(batch));
  }
  /// The stream on which collectives run; empty: [Note: groups on devices].
  const Stream& stream() const { return stream_; }
  /// A stream for copies to the host. It is ordered after collectives that were waited for on it,
  /// and after nothing that is launched after their issue, here or on the caller's stream. Made by
  /// the first call; empty where stream() is. Threads: the issuing thread.
  const Stream& host_reads();
  /// Messages between two members (p2p.h), over this group's connections: a group has either
  /// collectives or messages, so that their tags never meet. Lives as long as the group. Collective
  /// at the first call, and at the first since a recovery. Errors: kUsage where the backend has
  /// none.
  virtual P2P& p2p();

  /// Called by its World, before the first collective. `waits` records what this rank's streams
  /// wait for.
  void use_stream(const Stream& stream, std::shared_ptr<HostWaits> waits);

 protected:
  /// Implements issue(), where the current stream is the group's and is ordered after all that is
  /// sent.
  virtual std::unique_ptr<Work> start(Batch batch) = 0;
  const std::shared_ptr<HostWaits>& host_waits() const { return host_waits_; }

 private:
  std::unique_ptr<Work> issue_on_stream(Batch batch, const std::function<void()>& ready);

  Stream stream_;
  Stream host_reads_;
  Event before_;  // a point of the caller's stream, at the last issue
  std::shared_ptr<HostWaits> host_waits_;
};

/// Whether a group of that purpose ("data", "shard control") carries messages, which are in the
/// host's memory under every backend; the other groups carry tensors of the World's device.
bool carries_messages(std::string_view purpose);

/// The blocking forms, for control messages. They take ceil(log2 size) messages a rank and
/// exchange; the messages of the first four keep their size for any number of ranks. Collective.
void barrier(Group& group, const std::string& what);
/// Returns for each bit whether any rank has it set. All ranks pass as many.
std::vector<bool> any_of_ranks(Group& group, const std::vector<bool>& mine,
                               const std::string& what);
/// Sums integers over ranks, whose sums must fit into int64: 16 bytes a number and message. All
/// ranks pass as many. Floating-point numbers need rank order: all_reduce.
std::vector<std::int64_t> sum_of_ranks(Group& group, const std::vector<std::int64_t>& mine,
                                       const std::string& what);
/// Returns for each hash whether all ranks have the same: 16 bytes a hash and message. The caller,
/// who has the texts, finds the difference (all_gather_bytes). All ranks pass as many.
std::vector<bool> all_agree(Group& group, const std::vector<std::uint64_t>& hashes,
                            const std::string& what);
/// Two texts that differ.
struct Difference {
  int rank = 0;          ///< the first one whose text is not rank 0's
  std::string of_first;  ///< rank 0's
  std::string of_rank;
};
/// Returns none where all ranks have the same text. Gathers the hash of every rank, and of the
/// texts only the two that differ: a thousand contracts would not fit into memory.
std::optional<Difference> first_that_differs(Group& group, const std::string& mine,
                                             const std::string& what);
/// Sums in place, in rank order. Relayed where size x data is at most 256 KiB.
void all_reduce(Group& group, at::Tensor data, const std::string& what);
/// Returns every rank's bytes, in rank order, where every rank knows the length: one exchange.
/// Lengths that differ are different collectives: an error names them or they wait, and they never
/// meet.
std::vector<std::string> all_gather_fixed(Group& group, const std::string& mine,
                                          const std::string& what);
/// Returns every rank's bytes, in rank order; lengths may differ: two exchanges.
std::vector<std::string> all_gather_bytes(Group& group, const std::string& mine,
                                          const std::string& what);

/// Makes an error of one rank an error of all ranks: otherwise a rank leaves and others wait for
/// it. Runs `action` on this rank; where it throws on any rank, every rank throws the error of the
/// first of them; kinds are kept. Collective, on the control group.
void on_all_or_none(World& world, const std::string& what, const std::function<void()>& action);

/// Shares the errors of the ranks that refuse, so that all ranks do. Returns `mine` where it is
/// set, else the error of the first rank that has one, with its kind and `rank R: ` (its number in
/// the world) in front; null where none refuses. Collective; texts go to every rank.
std::exception_ptr shared_refusal(Group& group, int world_rank, const std::exception_ptr& mine,
                                  const std::string& what);

/// The numbers of all ranks of a world: 0 to size - 1.
std::vector<int> all_ranks(int size);

/// Returns rank 0's text on every rank. Collective.
std::string from_first_rank(World& world, const std::string& what, const std::string& text);

}  // namespace tessera::comm
