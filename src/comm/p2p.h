// P2P: messages between two ranks of a group, by which the stages of a pipeline hand tensors on.
//
// P2P is no collective: a message concerns its two ends. They find each other by the message's tag
// (P2PTag), never by how many messages came before, because the ranks of a pipeline send and
// receive in different orders: on a V schedule activations and gradients travel the same way. The
// two ends of each message are compared, so ends that differ wait or are refused, and never
// exchange data.
//
// Posting never blocks. A send ends when its receive was posted (it is unbuffered, as in Gloo), so
// two ranks that each wait for a send before they post a receive wait for ever: post receives
// first, wait for sends last. Threads: the rank's thread.
//
// [Note: messages on devices] Tensors of a device travel on separate streams, one for each other
// rank, direction and end, so that no message waits for the ends of another one. A message is
// ordered after what was launched on both callers' streams before it was posted. wait() orders the
// caller's stream after the message; the host waits at most until both ends are posted. done()
// queries the device. Next: ../../docs/communication.md.
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

/// Names a message, alike at both ends. Between two ranks a tag stands for one message at a time:
/// it may be used again when both ends have completed.
struct P2PTag {
  enum class Direction : std::uint8_t {
    kForward,   ///< activations, to the stage after
    kBackward,  ///< gradients, to the stage before
  };

  std::uint64_t step = 0;
  Direction direction = Direction::kForward;
  std::int32_t stage = 0;  ///< the sender's stage
  std::int32_t micro_batch = 0;
  std::int32_t index = 0;  ///< number of the tensor among those of the message's micro-batch
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
/// Computes the tag that the transport compares: [Note: message tags].
int message_number(const P2PTag& tag, const P2PExtent& extent, std::uint64_t fingerprint);

/// A direction in which messages travel: from one rank to another.
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
  int peer_rank = 0;  ///< the other end, as a rank of the world
  at::Tensor tensor;
  Stream stream = {};  ///< the stream on which a device carries it
  Event posted = {};   ///< marks what was launched before
  P2PExtent extent = {};

  bool sends() const { return end == End::kSend; }
};
/// "activations of stage 1, micro-batch 3, step 7, to rank 2 ([4, 8] Float)".
std::string to_string(const P2POp& op);

/// One end of a message in flight, as a backend carries it.
class PostedOp {
 public:
  explicit PostedOp(P2POp op) : op_(std::move(op)) {}
  virtual ~PostedOp() = default;
  PostedOp(const PostedOp&) = delete;
  PostedOp& operator=(const PostedOp&) = delete;

  /// Blocks until the received data is here, or the sent tensor may be overwritten. On a device:
  /// until that is launched; returns the event that ends it. Errors: as Transfer::wait().
  virtual Event finish() = 0;
  /// Does the same without blocking. Returns none while the message is in flight.
  virtual std::optional<Event> poll() = 0;
  /// Releases an end for which no caller waits any more. On a device it orders `stream`, the
  /// caller's, after the message before the tensor is released.
  virtual void let_go(const Stream& /*stream*/) {}
  /// Returns a function that says why the message can no longer end: DeviceWork::error.
  virtual std::function<std::string()> error() const { return {}; }

  const P2POp& op() const { return op_; }

 protected:
  P2POp op_;
};

struct P2PPlace;
class TracedMessage;

/// A message in flight. A caller may destroy it before the message has ended: the P2P keeps the
/// tensor's memory until the message has ended or the World recovers.
class Transfer {
 public:
  /// `posted` is null where there is nothing to carry.
  Transfer(const P2PPlace& place, std::shared_ptr<PostedOp> posted);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Blocks until the received data is here, or the sent tensor may be overwritten. For tensors on
  /// a device that holds for what is launched afterwards. Errors, within the World's timeout:
  /// LostRank naming the message and the other rank, where that rank is lost, stalled or has
  /// aborted the World; kComm when the ends differ.
  void wait();
  /// Whether the message has ended; never blocks. Over Gloo the first call starts a thread that
  /// finds out, so "true" may come a little late. Errors: as wait(), once they are known.
  bool done();

 private:
  friend class P2P;

  const std::shared_ptr<AbortFlag> abort_flag_;
  const std::shared_ptr<HostWaits> waits_;
  std::shared_ptr<PostedOp> posted_;       // null: the message has ended
  std::unique_ptr<TracedMessage> traced_;  // null: not traced, or it has ended
};

/// The rank and the group whose messages a P2P carries.
struct P2PPlace {
  std::vector<int> members;  ///< world ranks
  int self = 0;              ///< index into members
  at::Device device{at::kCPU};
  std::shared_ptr<AbortFlag> abort_flag = nullptr;  ///< null: it belongs to no World
  std::shared_ptr<HostWaits> waits = nullptr;       ///< records what this rank's streams wait for
};

class P2P {
 public:
  virtual ~P2P();
  P2P(const P2P&) = delete;
  P2P& operator=(const P2P&) = delete;

  int rank() const { return place_.self; }  ///< within the group
  int size() const { return static_cast<int>(place_.members.size()); }

  /// A number for P2PTag::step that this rank has not used. Ranks that begin a step together take
  /// the largest of their numbers. All messages of a step end with it.
  std::uint64_t next_step() const { return next_step_; }
  void begin_step(std::uint64_t step, const P2PExtent& extent) {
    next_step_ = step + 1;
    extent_ = extent;
  }

  /// Connects two ranks for each of these routes, before their first message. A backend needs it
  /// where ranks connect only when both send or receive, so that a message would wait for its other
  /// end. Collective: all ranks pass the same routes, also those between other ranks, and connect
  /// them in the same order. A route that is connected stays connected. Errors: LostRank.
  virtual void connect(const std::set<P2PRoute>& /*routes*/) {}
  /// Whether the two ends of a message match by their order on the route, and not by their tag.
  virtual bool matches_by_order() const { return false; }
  /// Whether a message takes less time when its receive is posted before it is sent.
  virtual bool gains_by_early_receives() const { return true; }

  /// `to` and `from` are indices into the group. Tensors are contiguous, on the backend's device,
  /// and have equal sizes and dtypes at both ends. An empty tensor is not sent. After a recovery
  /// the first call connects all ranks again, unless p2p_of() has. Errors: kInternal for what
  /// cannot be posted; kComm.
  ///
  /// The caller must not change the tensor until the send has ended.
  std::unique_ptr<Transfer> send(int to, const P2PTag& tag, const at::Tensor& tensor);
  /// `into` is written until the receive has ended.
  std::unique_ptr<Transfer> receive(int from, const P2PTag& tag, at::Tensor into);

 protected:
  explicit P2P(P2PPlace place);

  /// Starts an op that was checked.
  virtual std::unique_ptr<Transfer> post(P2POp op) = 0;

  const P2PPlace& place() const { return place_; }

 private:
  std::unique_ptr<Transfer> checked_and_posted(P2POp::End end, int peer, const P2PTag& tag,
                                               at::Tensor tensor);
  /// Gives an op on a device its stream, which is ordered after what the caller has launched.
  void put_on_stream(P2POp& op);

  const P2PPlace place_;
  std::uint64_t next_step_ = 0;
  P2PExtent extent_;
  /// Keys: peer, direction, end.
  std::map<std::tuple<int, P2PTag::Direction, P2POp::End>, Stream> streams_;
};

/// Describes the op for errors that say what does not end. It owns what it needs, but not the
/// tensor.
DeviceWork work_of(const P2POp& op, std::function<std::string()> error = {});
/// Orders the calling thread's current stream after the end of an op on a device. `waits`, which
/// may be null, records it.
void order_after(const P2POp& op, const Event& end, HostWaits* waits,
                 std::function<std::string()> error = {});
/// Errors: kInternal for a collective on a group that has a P2P.
void require_no_p2p(const P2P* p2p, const std::string& group);
/// The error of a message that was in flight when the World recovered.
LostRank lost_in_recovery(const P2POp& op);
/// The text of an error of a wait that timed out: "MESSAGE: waited 100 s for rank 2; ...".
std::string waited_in_vain(const P2POp& op, std::chrono::milliseconds time, int rank,
                           const Patience& patience);

/// The purpose of a P2P's group.
inline constexpr std::string_view kMessages = "messages";

/// Returns the P2P among `ranks` of the world (ascending, with this rank), on separate connections.
/// It is the same at every call. The first call, and the first one after a recovery, connects the
/// ranks and is collective among them. Errors: as World::group; kUsage where the backend carries no
/// messages.
std::shared_ptr<P2P> p2p_of(World& world, const std::vector<int>& ranks);

}  // namespace tessera::comm
