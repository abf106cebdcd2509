// Collectives among the ranks of one group: what a backend implements (gloo, in-process, nccl), and
// the blocking forms for control messages.
//
// Not a general message layer: only what sharding needs, with the semantics that it needs. Sums are
// formed in rank order in the output's dtype, so that every backend gives the same bits; an
// all-gather is in place. Every call carries a Label, and a backend never lets two calls with
// different labels meet (Gloo itself exchanges their data without an error: [Note: collective
// order] of fsdp/agreed/order.h). Threads: a group is issued to from one thread only.
//
// [Note: groups on devices] A group of tensors on a device owns a stream, on which its collectives
// run in the order of their issue; groups of the same ranks share it. issue() lets it be ordered after
// the caller's current stream, so what was launched there before is what is sent; wait() lets the
// caller's be ordered after the collective. Neither holds up the host: what is launched after wait()
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

/// Who calls: compared over ranks, printed when ranks disagree.
struct Label {
  Kind kind = Kind::kBatch;
  std::string unit;           ///< "model.layers.3", "control", ...
  std::uint32_t unit_id = 0;  ///< the same on every rank
  std::uint32_t micro_batch = 0;
  /// Runtime controls that differ from their defaults, in words: ranks that set them differently
  /// find out here.
  std::string controls = {};
  /// The pass and the stage of a collective of activations, whose unit is the layer's name for it:
  /// all layers have the same.
  ActivationPass activations = ActivationPass::kNone;
  int stage = UnitHere::kNoStage;  ///< of this rank
  // For reports, not compared:
  /// The unit in whose forward or backward a module issues it.
  std::string within = {};
  Pass pass = Pass::kForward;  ///< by who issues it
};

/// A type that lacks what an operation must answer is none, and does not compile here.
template <Operation... Each>
using OneOf = std::variant<Each...>;
using Op = OneOf<AllGather, ReduceScatter, AllReduce, AllToAll, Broadcast, RelayedGather, Combine>;

/// What goes out of an op.
const at::Tensor& first_tensor(const Op& op);

/// The collectives of one unit on one group: they go out together.
struct Batch {
  Label label;
  std::vector<Op> ops;
  std::int64_t bytes() const;  ///< sum of the full buffers
};

/// Something under way. wait() may be called once or more, from any one thread at a time; it does
/// whatever is left to do (the additions of a reduce-scatter). On a device the caller's current
/// stream waits, and the host at most until all ranks have issued. Who lets go of it unfinished does
/// not wait, and the memory of its tensors is free all the same only behind it: their stream comes
/// behind it then, at the latest when all ranks have issued. Errors: kComm with the label, and the
/// peers waited for.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
};

/// Notes that a backward runs on this thread, where one does.
void note_pass(Label& label);

class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;  ///< within the group
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  /// Whether nobody else is there (dry_world.h): what comes from others is what this rank has sent.
  virtual bool is_dry() const { return false; }
  /// Starts all ops of the batch, after `ready` has filled what goes out, on the group's stream. A
  /// group of one rank completes at once without a copy beyond what the op's output asks for.
  /// Collective.
  std::unique_ptr<Work> issue(Batch batch, const std::function<void()>& ready = {}) {
    note_pass(batch.label);
    if (stream_) return issue_on_stream(std::move(batch), ready);
    if (ready) ready();
    return start(std::move(batch));
  }
  /// On which collectives run; empty: [Note: groups on devices].
  const Stream& stream() const { return stream_; }
  /// For copies to the host: a stream that is ordered after collectives waited for on it, and behind
  /// nothing that is launched after their issue, here or on the caller's stream. Made by the first
  /// call; empty where stream() is. Threads: who issues.
  const Stream& host_reads();
  /// Messages between two members (p2p.h), over this group's connections: a group has collectives
  /// or messages, so that their tags never meet. Lives as long as the group. Collective at the first
  /// call, and at the first since a recovery. Errors: kUsage where the backend has none.
  virtual P2P& p2p();

  /// By its World, before the first collective. `waits` is told what this rank's streams wait for.
  void use_stream(const Stream& stream, std::shared_ptr<HostWaits> waits);

 protected:
  /// issue(), where the stream is the current one and is ordered after all that is sent.
  virtual std::unique_ptr<Work> start(Batch batch) = 0;
  const std::shared_ptr<HostWaits>& host_waits() const { return host_waits_; }

 private:
  std::unique_ptr<Work> issue_on_stream(Batch batch, const std::function<void()>& ready);

  Stream stream_;
  Stream host_reads_;
  Event before_;  // of the caller's stream, at the last issue
  std::shared_ptr<HostWaits> host_waits_;
};

/// Whether a group of that purpose ("data", "shard control") carries messages, in the memory of the
/// host under every backend; the others carry tensors of the World's device.
bool carries_messages(std::string_view purpose);

/// Blocking forms, for control messages: ceil(log2 size) messages a rank and exchange, of which the
/// first four keep their size however many ranks there are. Collective.
void barrier(Group& group, const std::string& what);
/// For each bit whether any rank has it set. All have as many.
std::vector<bool> any_of_ranks(Group& group, const std::vector<bool>& mine,
                               const std::string& what);
/// Sums over ranks of whole numbers that stay within int64: 16 bytes a number and message. All have
/// as many. What has digits is added in rank order: all_reduce.
std::vector<std::int64_t> sum_of_ranks(Group& group, const std::vector<std::int64_t>& mine,
                                       const std::string& what);
/// For each hash whether all ranks have the same: 16 bytes a hash and message. What differs is for
/// the caller to find, who has the texts (all_gather_bytes). All have as many.
std::vector<bool> all_agree(Group& group, const std::vector<std::uint64_t>& hashes,
                            const std::string& what);
/// Two texts that differ.
struct Difference {
  int rank = 0;          ///< the first one whose text is not rank 0's
  std::string of_first;  ///< rank 0's
  std::string of_rank;
};
/// None where all have the same text. Everyone's hash goes to everyone, of the texts those two
/// alone: a thousand contracts would not fit into memory.
std::optional<Difference> first_that_differs(Group& group, const std::string& mine,
                                             const std::string& what);
/// In place, in rank order. Relayed up to 256 KiB in all, of size x data.
void all_reduce(Group& group, at::Tensor data, const std::string& what);
/// Every rank's bytes, in rank order, where every rank knows the length: one exchange. Lengths that
/// differ all the same are different collectives: they are named or wait, and never meet.
std::vector<std::string> all_gather_fixed(Group& group, const std::string& mine,
                                          const std::string& what);
/// Every rank's bytes, in rank order; lengths may differ: two exchanges.
std::vector<std::string> all_gather_bytes(Group& group, const std::string& mine,
                                          const std::string& what);

/// What one rank finds, all ranks find: the same error everywhere instead of a rank that leaves and
/// others that wait for it. Runs `action` on this rank; where it throws on any rank, every rank
/// throws the error of the first of them; kinds are kept. Collective, on the control group.
void on_all_or_none(World& world, const std::string& what, const std::function<void()>& action);

/// Shares the errors of the ranks that refuse, so that all ranks do. Returns `mine` where it is
/// set, else the error of the first rank that has one, with its kind and `rank R: ` (its number in
/// the world) in front; null where none refuses. Collective; texts go to every rank.
std::exception_ptr shared_refusal(Group& group, int world_rank, const std::exception_ptr& mine,
                                  const std::string& what);

/// Numbers of all ranks of a world: 0 to size - 1.
std::vector<int> all_ranks(int size);

/// Rank 0's text on every rank. Collective.
std::string from_first_rank(World& world, const std::string& what, const std::string& text);

}  // namespace tessera::comm
