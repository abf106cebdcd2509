// WaitBoard: the threads of this rank that wait for other ranks, and the latest issues of its
// groups.
//
// The failure watch reads it: it finds ranks that wait for each other in different orders by
// comparing what they issued ([Note: failure]). An aborted World ends waits through it, and the
// watch notes on it which rank delays a wait.
//
// StartUpLog writes a line now and then while a rank waits in a start-up, with what the others do.
// Minutes of silence look like a run that hangs. It has one thread, only on rank 0, from
// World::begin_start_up() to end_start_up(). Pure. Next: peer_watch.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "launch/order_log.h"
#include "launch/peer_watch.h"
#include "launch/rank_board.h"

namespace tessera::comm {

/// The latest issues of one group on this rank. The issuing code keeps it (comm's flight recorder),
/// and the failure watch compares it with other ranks'. Threads: any.
class Recorded {
 public:
  virtual ~Recorded() = default;
  /// Returns one line an entry, in the format of find_disagreement().
  virtual std::string lines() const = 0;
  virtual IssuedHashes issued() const = 0;
  /// Returns none for messages.
  virtual std::optional<BoardLane> lane() const { return std::nullopt; }
};

/// A wait of a thread.
class Blocked {
 public:
  virtual ~Blocked() = default;
  virtual void abort() = 0;  ///< makes the wait throw; any thread
  /// Says for which collective, and for which rank just now; any thread.
  virtual std::optional<PeerWait> waits_for() const { return std::nullopt; }
};

/// The work of a device in flight, for which perhaps no thread of this rank waits. Threads: any.
class DeviceWatch {
 public:
  virtual ~DeviceWatch() = default;
  /// Why it does not continue; none while it does. Called at every look of the failure watch.
  virtual std::optional<std::string> stalled() = 0;
};

/// Threads: any.
class WaitBoard {
 public:
  void enter(Blocked& wait);
  void leave(Blocked& wait);
  void abort_all();

  /// Adds the log of an open group, until it is removed.
  void add(std::shared_ptr<Recorded> log);
  void remove(const Recorded& log);
  int groups() const;  ///< number of the groups whose logs it has
  /// Watches all ranks that are up, ascending, from now on, whichever groups are opened.
  void watch(std::vector<int> ranks);
  /// The rank with which the store ends, if it is one.
  void set_store_rank(std::optional<int> rank);
  std::optional<int> store_rank() const;
  std::string lines() const;
  Standing standing() const;
  /// The issues of this rank, over all of its groups.
  OrderLog& order() { return order_; }
  /// Keeps the rank's present board, unless one is kept already: its waits are about to end.
  void freeze() noexcept;
  /// Returns the kept board, else the present one. `most_items`: make_board().
  RankBoard board(int rank, std::size_t most_items) const;
  /// Tells others from now on that this rank issues nothing any more.
  void set_leaving();
  /// Watches the rank's device, as long as `device` lives.
  void watch_device(std::weak_ptr<DeviceWatch> device);
  std::optional<std::string> stalled_device() const;

  /// Held while the failure watch looks, and acts on what it has found.
  class Look {
   public:
    explicit Look(WaitBoard& board);
    ~Look();
    Look(const Look&) = delete;
    Look& operator=(const Look&) = delete;

   private:
    WaitBoard& board_;
  };
  /// Held while a rank is about to be blamed: the failure watch listens to it, for whichever rank a
  /// wait is.
  class Doubt {
   public:
    Doubt(WaitBoard& board, int rank);
    ~Doubt();
    Doubt(const Doubt&) = delete;
    Doubt& operator=(const Doubt&) = delete;

    /// When the watch has found a beat of the rank from after the beginning of the doubt; none: it
    /// has found no such beat.
    std::optional<std::chrono::steady_clock::time_point> last_beat() const;

   private:
    WaitBoard& board_;
  };
  /// The watch tells when it found the last beat (PeerWatch::last_beat) of a rank that was doubtful
  /// when its look began.
  void heard(int rank, std::optional<std::chrono::steady_clock::time_point> beat);

  /// Whether a look that began before `time` is still in progress: where the store does not answer,
  /// nothing that others have said since can be known.
  bool looks_since_before(std::chrono::steady_clock::time_point time) const;

  /// Begins an epoch after a recovery: forgets which rank delayed a wait before it.
  void set_epoch(int epoch);
  /// Notes the rank that the failure watch takes to delay a wait of `epoch`.
  void set_cause(int epoch, const PeerWait& wait, int rank);
  std::optional<int> cause_of(std::uint64_t group, std::uint64_t sequence) const;

 private:
  struct Item {
    Blocked* wait;
    std::chrono::steady_clock::time_point since;
  };
  struct Doubted {
    int rank;
    /// Beats found until then may be from before the doubt, later ones are not.
    std::optional<std::chrono::steady_clock::time_point> heard_first;
    std::optional<std::chrono::steady_clock::time_point> last_beat;
  };
  struct Frozen {
    int threads_waiting = 0;
    std::vector<TimedWait> waits = {};
    std::vector<BoardLane> lanes = {};
  };
  Frozen now() const TESSERA_REQUIRES(mutex_);

  OrderLog order_;
  mutable base::Mutex mutex_;
  std::optional<Frozen> frozen_ TESSERA_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point frozen_since_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Item> waits_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Recorded>> logs_ TESSERA_GUARDED_BY(mutex_);
  std::map<const Doubt*, Doubted> doubts_ TESSERA_GUARDED_BY(mutex_);
  std::vector<int> peers_ TESSERA_GUARDED_BY(mutex_);
  std::optional<int> store_rank_ TESSERA_GUARDED_BY(mutex_);
  bool leaves_ TESSERA_GUARDED_BY(mutex_) = false;
  std::weak_ptr<DeviceWatch> device_ TESSERA_GUARDED_BY(mutex_);
  std::optional<std::chrono::steady_clock::time_point> looks_since_ TESSERA_GUARDED_BY(mutex_);
  int epoch_ TESSERA_GUARDED_BY(mutex_) = 0;
  PeerWait caused_wait_ TESSERA_GUARDED_BY(mutex_);
  int cause_ TESSERA_GUARDED_BY(mutex_) = -1;
};

/// Is on the board while it lives. Where an error ends the wait, the board is kept as it was.
class OnBoard {
 public:
  OnBoard(WaitBoard& board, Blocked& wait)
      : board_(board), wait_(wait), exceptions_(std::uncaught_exceptions()) {
    board_.enter(wait_);
  }
  ~OnBoard() {
    if (std::uncaught_exceptions() > exceptions_) board_.freeze();
    board_.leave(wait_);
  }
  OnBoard(const OnBoard&) = delete;
  OnBoard& operator=(const OnBoard&) = delete;

 private:
  WaitBoard& board_;
  Blocked& wait_;
  const int exceptions_;
};

/// Runs `meet`, which reads the abort flag by itself; meanwhile the watch listens for the peers'
/// heartbeats.
void meet_on_board(WaitBoard& board, const std::function<void()>& meet);

class StartUpLog {
 public:
  /// Returns the rest of the line: "" for no line. Called on the thread; must not throw.
  using Works = std::function<std::string()>;

  /// Writes a line to `say` every so often while the longest wait on `board` is as long.
  StartUpLog(std::shared_ptr<const WaitBoard> board, std::chrono::milliseconds every, Works works,
             std::function<void(const std::string&)> say);
  ~StartUpLog();
  StartUpLog(const StartUpLog&) = delete;
  StartUpLog& operator=(const StartUpLog&) = delete;

 private:
  void run();

  const std::shared_ptr<const WaitBoard> board_;
  const std::chrono::milliseconds every_;
  const Works works_;
  const std::function<void(const std::string&)> say_;
  base::Mutex mutex_;
  base::Condition wake_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera::comm
