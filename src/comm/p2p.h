// P2P: messages between two ranks of a group, by which the stages of a pipeline hand tensors on.
//
// No collective: a message concerns its two ends, and these find each other by what it is
// (P2PTag), never by how many came before. Ranks of a pipeline send and receive in orders of their
// own: on a V activations and gradients take the same way. Both ends are compared pair by pair, so
// that what differs waits or is refused and is never exchanged.
//
// Posting never blocks. A send ends when its receive was posted (unbuffered, as Gloo is), so two
// ranks that each wait for a send before they post a receive wait for ever: post receives first,
// wait for sends last. Threads: the rank's thread.
//
// [Note: messages on devices] Tensors of a device travel on streams of their own, one for each other
// rank, direction and end, so that no message waits for another one's ends. A message is ordered after
// what was launched on both callers' streams before it was posted; wait() lets the caller's stream
// be ordered after the message, and the host waits at most until both ends are posted. done() asks the
// device. Next: ../../docs/communication.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/stream.h"
#include "launch/abort_flag.h"

namespace tessera {
class World;
}

namespace tessera::comm {

class HostWaits;
struct DeviceWork;

/// Which message: both ends name it alike. Between two ranks a tag stands for one message at a time:
/// it is used again, if at all, when both ends are through.
struct P2PTag {
  enum class Direction : std::uint8_t {
    kForward,   ///< activations, to the stage after
    kBackward,  ///< gradients, to the stage before
  };

  std::uint64_t step = 0;
  Direction direction = Direction::kForward;
  std::int32_t stage = 0;  ///< of the sender
  std::int32_t micro_batch = 0;
  std::int32_t index = 0;  ///< of its tensors
  auto operator<=>(const P2PTag&) const = default;
};
/// "activations of stage 1, micro-batch 3, step 7"; ", tensor 1" of the second one.
std::string to_string(const P2PTag& tag);

/// The limits of the numbers of a P2PTag in one step, the same at both ends.
struct P2PExtent {
  static constexpr std::int32_t kTensors = 16;
  static constexpr std::int64_t kMostCells = std::int64_t{1} << 18;  ///< stages times micro-batches

  std::int32_t stages = 64;
  std::int32_t micro_batches = 4096;
};
/// The tag of a message. [Note: message tags]
int message_number(const P2PTag& tag, const P2PExtent& extent, std::uint64_t fingerprint);

/// A way that messages take: in one direction, from one rank to another.
struct P2PRoute {
  int from = 0;  ///< indices into the group
  int to = 0;
  P2PTag::Direction direction = P2PTag::Direction::kForward;
  auto operator<=>(const P2PRoute&) const = default;
};

/// One end of a message, as a backend posts it.
struct P2POp {
  enum class End : std::uint8_t { kSend, kReceive };

  End end = End::kSend;
  P2PTag tag;
  int peer = 0;       ///< the other end, as an index into the group
  int peer_rank = 0;  ///< of the world
  at::Tensor tensor;
  Stream stream = {};  ///< on which a device carries it
  Event posted = {};   ///< behind what was launched before
  P2PExtent extent = {};

  bool sends() const { return end == End::kSend; }
};
/// "activations of stage 1, micro-batch 3, step 7, to rank 2 ([4, 8] Float)".
std::string to_string(const P2POp& op);

/// One end of a message under way, as a backend carries it.
class PostedOp {
 public:
  explicit PostedOp(P2POp op) : op_(std::move(op)) {}
  virtual ~PostedOp() = default;
  PostedOp(const PostedOp&) = delete;
  PostedOp& operator=(const PostedOp&) = delete;

  /// Returns when what was received is here or what was sent may be overwritten; on a device when
  /// that is launched, with the event that ends it. Errors: as Transfer::wait().
  virtual Event finish() = 0;
  /// Does the same without blocking; returns none while it is not through.
  virtual std::optional<Event> poll() = 0;
  /// Ends what is no longer waited for, on a device: orders `stream`, the caller's, after the
  /// message before the tensor is released.
  virtual void let_go(const Stream& /*stream*/) {}
  /// Tells why it cannot end any more: DeviceWork::error.
  virtual std::function<std::string()> error() const { return {}; }

  const P2POp& op() const { return op_; }

 protected:
  P2POp op_;
};

struct P2PPlace;
class TracedMessage;

/// A message under way. Who lets go of it unfinished loses nothing: the P2P keeps the tensor's
/// memory until the message is through or the World recovers.
class Transfer {
 public:
  /// `carried` is null where there is nothing to carry.
  Transfer(const P2PPlace& place, std::shared_ptr<PostedOp> carried);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Blocks until what was received is here, or what was sent may be overwritten; of tensors on a
  /// device by what is launched afterwards. Errors: kComm that names the message, the other rank
  /// and what has become of it: LostRank when it is lost, stalled, or has aborted the World, within
  /// the World's timeout; kComm when the ends differ.
  void wait();
  /// Whether it is through; never blocks. A yes may come a little late: over Gloo a thread finds
  /// out, from the first question on. Errors: as wait(), where they are known.
  bool done();

 private:
  friend class P2P;

  const std::shared_ptr<AbortFlag> abort_flag_;
  const std::shared_ptr<HostWaits> waits_;
  std::shared_ptr<PostedOp> carried_;      // null: it is through
  std::unique_ptr<TracedMessage> traced_;  // null: not traced, or it has ended
};

/// The rank and the group whose messages a P2P carries.
struct P2PPlace {
  std::vector<int> members;  ///< world ranks
  int self = 0;              ///< index into members
  at::Device device{at::kCPU};
  std::shared_ptr<AbortFlag> abort_flag = nullptr;  ///< null: of no World
  std::shared_ptr<HostWaits> waits = nullptr;       ///< told what this rank's streams wait for
};

class P2P {
 public:
  virtual ~P2P();
  P2P(const P2P&) = delete;
  P2P& operator=(const P2P&) = delete;

  int rank() const { return place_.self; }  ///< within the group
  int size() const { return static_cast<int>(place_.members.size()); }

  /// For who numbers steps (P2PTag::step): one that this rank has not begun. Those that all ranks
  /// begin together take the largest. All messages of a step end with it.
  std::uint64_t next_step() const { return next_step_; }
  void begin_step(std::uint64_t step, const P2PExtent& extent) {
    next_step_ = step + 1;
    extent_ = extent;
  }

  /// Before the first message of any of these ways, where the backend connects two ranks only when
  /// both first meet, so that a message would wait there for its other end. Collective: all ranks give
  /// the same ways, those between others included, and go through them in their order. Ways that are
  /// connected stay so. Errors: LostRank.
  virtual void connect(const std::set<P2PRoute>& /*routes*/) {}
  /// Whether the two ends of a message find each other by their order on its way, and not by their tag.
  virtual bool matches_by_order() const { return false; }
  /// Whether a message takes less time when its receive was posted before it is sent.
  virtual bool gains_by_early_receives() const { return true; }

  /// `to`, `from`: indices into the group. Tensors are contiguous, where the backend has them, and
  /// alike at both ends: sizes and dtype. An empty one sends nothing. After a recovery the first call
  /// connects all ranks again where p2p_of() has not. Errors: kInternal for what cannot be posted; kComm.
  ///
  /// The tensor keeps its values until the send is done.
  std::unique_ptr<Transfer> send(int to, const P2PTag& tag, const at::Tensor& tensor);
  /// `into` is written until the receive is done.
  std::unique_ptr<Transfer> receive(int from, const P2PTag& tag, at::Tensor into);

 protected:
  explicit P2P(P2PPlace place);

  /// Starts a checked op.
  virtual std::unique_ptr<Transfer> post(P2POp op) = 0;

  const P2PPlace& place() const { return place_; }

 private:
  std::unique_ptr<Transfer> checked_and_posted(P2POp::End end, int peer, const P2PTag& tag,
                                               at::Tensor tensor);
  /// Of a op on a device: its stream, and what is before it.
  void put_on_stream(P2POp& op);

  const P2PPlace place_;
  std::uint64_t next_step_ = 0;
  P2PExtent extent_;
  /// By peer, direction and end.
  std::map<std::tuple<int, P2PTag::Direction, P2POp::End>, Stream> streams_;
};

/// As it is blamed for what does not go on. It owns what it needs, and not the op's tensor.
DeviceWork work_of(const P2POp& op, std::function<std::string()> error = {});
/// The calling thread's current stream is ordered after the end of a op on a device; `waits`, which
/// may be null, is told.
void order_after(const P2POp& op, const Event& end, HostWaits* waits,
                 std::function<std::string()> error = {});
/// What each backend refuses alike. Errors: kInternal for a collective of a group that has P2P.
void require_no_p2p(const P2P* p2p, const std::string& group);
/// Of a op under way when the World recovered.
LostRank lost_in_recovery(const P2POp& op);
/// Of a wait that has ended: "LETTER: waited 100 s for rank 2; ...".
std::string waited_in_vain(const P2POp& op, std::chrono::milliseconds time, int rank,
                           const Patience& patience);

/// The purpose of a P2P's group.
inline constexpr std::string_view kMessages = "messages";

/// The messages among `ranks` of the world (ascending, this one among them), on connections of
/// their own; the same at every call. Collective among them at the first call, and at the first
/// since a recovery, when it connects them. Errors: as World::group; kUsage where the backend has
/// no messages.
std::shared_ptr<P2P> p2p_of(World& world, const std::vector<int>& ranks);

}  // namespace tessera::comm
