// FailureWatch: two threads a process (or thread rank). One learns when the run fails elsewhere,
// the other tells that this rank lives.
//
// [Note: failure] Gloo cannot be aborted as a whole and its destructors may block, so a failing
// rank does not unwind: it writes the failure key, prints, and leaves by _exit (failure_report.h).
// The watches of the other ranks see the key at their next look, over a separate store connection,
// and end their processes too. They also watch for what no rank reports: the store gone with rank
// 0, a peer without a sign of life, a collective on this rank's device that does not end
// (WaitBoard::watch_device), and ranks that wait for each other in different orders or in different
// groups (peer_watch.h). However long a look takes, the heartbeats continue.
//
// [Note: disagreements] Ranks that call different things are a mistake that their program may
// catch: no rank is lost, and nothing hangs once the waits end. So the watch aborts the World on
// all ranks, and each gets an error in the call that waits, or in its next call of the library. A
// watch ends its rank only where the rank has not thrown that error within `acknowledged_within`,
// or is still in the wait then: it computes for longer, or hangs outside of the waits that the
// board knows, and other ranks may wait for it. An error in a thread of the library counts as
// thrown once the program gets it (KeepsErrors).
//
// [Note: grace] A host program whose interpreter has handlers to run must not be ended by _exit at
// once (LostRankEnds::kCall). Then `failed` and `lost` abort the World for good, the rank's call
// throws, and the watch ends the process only where nothing was thrown by the end of the grace
// period, as with a disagreement.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "launch/peer_watch.h"
#include "launch/store.h"
#include "launch/wait_board.h"

namespace tessera::comm {

/// Returns the few ranks before `self` in a ring of `ranks`, and `self`. Where many ranks ask at
/// the same time, each asks for the signs of life of only so many others.
std::vector<int> neighbours(std::vector<int> ranks, int self);

/// Returns those of `ranks` whose watches show no sign of life for `time`. Waits for as long.
/// Errors: LostRank when the store does not answer.
std::vector<int> silent_ranks(Store& store, const std::vector<int>& ranks,
                              std::chrono::milliseconds time);

struct WatchOptions {
  int rank = 0;
  std::chrono::milliseconds poll{200};            ///< between looks, and between heartbeats
  std::chrono::milliseconds blocked_after{2000};  ///< a wait this long is examined
  std::chrono::milliseconds silent_after{
      6000};  ///< a peer without a heartbeat for this long is lost
  std::chrono::milliseconds acknowledged_within{5000};  ///< [Note: disagreements]
  /// [Note: grace]; none: `failed` and `lost` end the process.
  std::optional<std::chrono::milliseconds> grace = std::nullopt;
};
/// Returns the options for a rank of so many.
WatchOptions watch_options(int rank, int ranks);

/// The reason of an abort: "rank R: why", or how the ranks disagree.
struct Abort {
  std::string why;
  bool is_disagreement = false;
};
/// Encodes an abort for the store: `why`, for a disagreement after a mark with which no rank's text
/// begins.
std::string encode(const Abort& abort);

class FailureWatch {
 public:
  /// Callbacks of the watch, on its thread. Each is called at most once; those with an epoch at
  /// most once in each epoch.
  struct Actions {
    /// the failure key exists: why as written there
    std::function<void(const std::string& why)> failed;
    std::function<void(const std::string& why)> lost;  ///< store gone, silent peer, stalled device
    /// Ranks issue different collectives, in this epoch; they may have recovered meanwhile.
    std::function<void(const std::string& why, int epoch)> disagree;
    /// A rank aborted its World, or announced a disagreement (after `disagree` on this rank, too).
    std::function<void(const Abort& abort, int epoch)> aborted = [](const Abort&, int) {};
    /// Whether the program knows that its World is aborted.
    std::function<bool()> acknowledged = [] { return true; };
    /// The ranks disagree, and the program does not know of it in time.
    std::function<void(const std::string& why, int epoch)> unacknowledged = [](const std::string&,
                                                                               int) {};
    /// The grace period after `failed` or `lost` is over, and the program does not know of it.
    std::function<void()> grace_is_over = [] {};
  };

  FailureWatch(std::shared_ptr<Store> own_connection, std::shared_ptr<WaitBoard> board,
               WatchOptions options, Actions actions);
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  void stop();
  /// Called after a recovery: what was seen in earlier epochs no longer counts.
  void set_epoch(int epoch);
  /// The number of times that it has looked at its peers.
  std::uint64_t looks() const { return looks_; }

 private:
  class Keys;

  void each_poll(void (FailureWatch::*act)());
  void look_or_end();
  void look();
  bool look_for_abort(int epoch);
  void expect_acknowledgement(const std::string& why, int epoch);
  void look_for_acknowledgement(int epoch);
  void look_at_peers(int epoch);
  /// Called after `failed` and `lost`.
  void begin_grace();
  void look_for_end_of_grace();
  /// Whether the program has thrown why its World is aborted, which it was to learn `time` ago.
  bool has_thrown(std::chrono::milliseconds time, bool& stands) const;
  void beat();

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<WaitBoard> board_;
  const WatchOptions options_;
  const Actions actions_;
  base::Mutex mutex_;
  base::Condition wake_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  // an action that ends the run was taken: nothing more to look for
  std::atomic<bool> over_{false};
  std::atomic<int> epoch_{0};
  std::atomic<std::uint64_t> looks_{0};
  int aborted_epoch_ = -1;
  int disagreed_epoch_ = -1;
  struct Unacknowledged {
    std::string why;
    int epoch;
    std::chrono::steady_clock::time_point since;
  };
  std::optional<Unacknowledged> unacknowledged_;  ///< a disagreement
  std::optional<std::chrono::steady_clock::time_point> grace_since_;
  std::uint64_t beats_ = 0;
  const std::unique_ptr<Keys> keys_;
  PeerWatch peers_;
  std::thread thread_;
  std::thread heart_;
};

}  // namespace tessera::comm
