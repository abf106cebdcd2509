// FailureWatch: one thread a process (or thread rank) that learns when the run fails elsewhere.
//
// [Note: failure] Gloo cannot be aborted as a whole and its destructors may block, so a failing
// rank does not unwind: it writes the failure key, prints, and leaves by _exit (failure_report.h).
// This thread sees the key within a quarter of a second, over a store connection of its own, and
// ends its process too. It also watches for what no rank reports: the store gone with rank 0, a
// peer without a sign of life, and ranks that wait for each other in different orders (found by
// comparing what they issued, wait_board.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/store.h"
#include "comm/wait_board.h"

namespace tessera::comm {

/// Keys of the store.
namespace store_key {
inline constexpr const char* kFailure = "failure";  ///< a FailureRecord: every process leaves
std::string poison(int epoch);                      ///< "rank R: why": every World is poisoned
std::string pulse(int rank);                        ///< a number that grows while the rank lives
}  // namespace store_key

/// Those of `ranks` whose watches give no sign of life for `time`. Waits for as long. Errors:
/// PeerLost when the store does not answer.
std::vector<int> silent_ranks(Store& store, const std::vector<int>& ranks,
                              std::chrono::milliseconds time);

struct WatchOptions {
  int rank = 0;
  std::chrono::milliseconds poll{200};
  std::chrono::milliseconds blocked_after{2000};  ///< a wait this long publishes what was issued
  std::chrono::milliseconds silent_after{
      6000};  ///< a peer without a heartbeat for this long is lost
};

class FailureWatch {
 public:
  /// What is to be done, on the watch's thread. Each is called at most once (poisoned: once an
  /// epoch).
  struct Actions {
    std::function<void(const std::string& why)> failed;  ///< the failure key: why as written there
    std::function<void(const std::string& why)> lost;    ///< store gone, or a silent peer
    std::function<void(const std::string& why)> disagree;  ///< ranks issue different collectives
    std::function<void(const std::string& why, int epoch)> poisoned;  ///< a rank poisoned its World
  };

  FailureWatch(std::shared_ptr<Store> own_connection, std::shared_ptr<WaitBoard> board,
               WatchOptions options, Actions actions);
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  void stop();
  /// After a recovery: what was seen in earlier epochs no longer counts.
  void set_epoch(int epoch);

 private:
  void run();
  void look();
  void publish(int epoch);
  void compare_with_peers(int epoch);
  void listen_for_peers();

  struct Pulse {
    std::string beat;
    std::chrono::steady_clock::time_point since;
  };

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<WaitBoard> board_;
  const WatchOptions options_;
  const Actions actions_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::atomic<bool> over_{false};  // an action that ends the run was taken, nothing to look for
  std::atomic<int> epoch_{0};
  int poisoned_epoch_ = -1;
  std::uint64_t beats_ = 0;
  std::string published_;
  int published_epoch_ = -1;
  std::map<int, Pulse> pulses_;
  std::thread thread_;
};

}  // namespace tessera::comm
