// Transport over Gloo: sends and receives of a tag to a peer, waits for them with a deadline, and
// whom an error blames.
//
// Collectives (exchange.h), messages (gloo_p2p.h) and what connects their ranks
// (point_to_point.cpp) use it: each names its wait; posting, deadlines and blame are the same for
// all. Next: point_to_point.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/backend.h"
#include "comm/batch.h"
#include "comm/buffer_pool.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"

namespace tessera::comm {

struct ChannelOptions {
  std::string name;          ///< "gather of ranks 0, 1"
  std::vector<int> members;  ///< world ranks
  int self = 0;              ///< index into members
  std::chrono::milliseconds timeout{100000};
  /// Whether the ranks exchange what each is about to issue before every collective, and name both
  /// where they differ.
  bool compare_entries = false;
  std::shared_ptr<AbortFlag> abort_flag;
  std::shared_ptr<WaitBoard> board;
  /// Opens the group. Collective; `epoch` counts recoveries. Connects all ranks, unless there is an
  /// open_pair. `waits_for` is told the index of the rank for which it waits; -1: none in
  /// particular.
  std::function<c10::intrusive_ptr<c10d::Backend>(int epoch,
                                                  const std::function<void(int peer)>& waits_for)>
      open;
  /// Returns a function that opens a backend of only this rank and the one at index `peer`, in the
  /// order of their indices. Both ranks call it, on the thread that issues; the returned function
  /// runs on another thread.
  std::function<std::function<c10::intrusive_ptr<c10d::Backend>()>(int epoch, int peer)> open_pair;

  int world_rank(int peer) const { return members[static_cast<std::size_t>(peer)]; }
};

/// Fills all but `open` and `open_pair`.
ChannelOptions channel_options(const GroupPlace& place);

/// The connection to a peer: the backend, and the peer's rank in it.
struct Line {
  c10::intrusive_ptr<c10d::Backend> backend;  ///< null: not connected yet
  int rank = 0;
};

/// Says that a transfer cannot even begin: the connection is closed already.
struct NotPosted : std::runtime_error {
  NotPosted(int to, const std::string& reason) : std::runtime_error(reason), peer(to) {}
  int peer;
};

/// The state that all transfers of a group share. The issuing thread writes a line once an epoch,
/// before the first transfer that needs it; waiting threads only read the lines that they use. All
/// lines are reset while nothing is in flight (PointToPointGroup::reset).
class Channel {
 public:
  using Posted = c10::intrusive_ptr<c10d::Work>;
  enum class End : std::uint8_t { kSend, kReceive };

  explicit Channel(ChannelOptions what);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int size() const { return static_cast<int>(options.members.size()); }
  /// The caller keeps `memory` until the transfer has ended. Errors: NotPosted.
  Posted post(End end, int peer, const at::Tensor& memory, int tag) const;

  at::Tensor take_buffer(std::int64_t bytes);  ///< at least that many; contents undefined
  void recycle(at::Tensor buffer);

  const ChannelOptions options;
  const std::shared_ptr<FlightRecorder> log;
  std::vector<Line> lines;  ///< by index of the peer

 private:
  base::Mutex mutex_;
  FreeBlocks free_buffers_ TESSERA_GUARDED_BY(mutex_){2.0};
};

/// A wait for peers (indices into the channel's group), with its deadline and the rank that an
/// error blames. Threads: one at a time; a watch may read it from any thread.
class TransportWait : public Blocked {
 public:
  std::optional<PeerWait> waits_for() const final;

 protected:
  /// `peer` is waited for from the beginning; -1: none in particular.
  explicit TransportWait(std::shared_ptr<Channel> channel, int peer = -1)
      : channel_(std::move(channel)), peer_(peer) {}

  /// Tells the board what it waits for, from a world rank; -1: from all.
  virtual PeerWait standing(int rank) const = 0;
  virtual std::string text() const = 0;  ///< names in errors what is waited for
  /// "TEXT: waited 100 s for rank 3; ..."
  virtual std::string waited_in_vain_for(int rank) const;
  /// The text in errors before the reason for which the World was aborted.
  virtual std::string before_reason() const { return {}; }
  /// Called when the transfer to or from `peer` has not ended in time. Errors: LostRank, always.
  [[noreturn]] virtual void time_is_up(int peer) { blame_cause(peer); }

  const ChannelOptions& options() const { return channel_->options; }
  int world_rank(int peer) const { return options().world_rank(peer); }
  void check_aborted() const;
  void begin();  ///< sets the deadline by which peers have to come
  bool is_over() const { return std::chrono::steady_clock::now() >= deadline_; }
  void set_peer(int peer) { peer_ = peer; }

  /// Runs what posts transfers. Errors: LostRank.
  template <class Post>
  void posting(const Post& post) {
    std::optional<NotPosted> failed;
    try {
      post();
    } catch (const NotPosted& error) {
      failed = error;
    }
    // `post` has released its locks by now: an abort that holds the board's lock may wait for them.
    if (failed) blame_connection(*failed);
  }
  /// Blocks until the transfer has ended. Errors: LostRank.
  void wait_for(c10d::Work& transfer, int peer);
  /// Errors: LostRank, always. It says what other ranks say; else that the wait was in vain, where
  /// its time is over and the peer lives; else `lost`.
  [[noreturn]] void blame(int peer, const std::string& lost);
  /// Errors: LostRank, always. It says that the wait was in vain, for the peer or for the rank for
  /// which the peer itself waits, whose name the watch knows by then.
  [[noreturn]] void blame_cause(int peer) const;

  const std::shared_ptr<Channel> channel_;
  std::chrono::milliseconds patience_{0};  ///< 0: it has not begun

 private:
  [[noreturn]] void blame_connection(const NotPosted& failed);
  [[noreturn]] void fail(int peer, const std::string& what);

  std::atomic<int> peer_;
  std::chrono::steady_clock::time_point deadline_;
};

/// Waits as long as messages may take (Patience::words) before `peer`, a world rank, is blamed, and
/// longer while the failure watch waits for the store of another rank: by the store's timeout it
/// knows that the store is gone. `deadline` is that of a wait that a closed connection has ended:
/// while the peer's heartbeats continue it waits as long again after the deadline, but no longer
/// than WatchTimes::explaining(), since a live peer will say why it has closed its connections.
/// Returns whether the deadline is over and the peer lives: then it is late, and not lost. Errors:
/// LostRank with what another rank has said in the meantime, after `what`.
bool hear_others(const AbortFlag& abort_flag, WaitBoard& board, int peer,
                 std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt,
                 const std::string& what = {});
/// "what: waited 100 s for rank 3; ...", and the reason as far as `patience` knows it. No ranks:
/// all have come after all, as after this rank was stopped for longer than the timeout.
std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience);

}  // namespace tessera::comm
