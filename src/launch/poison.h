// Poison: the mark that a World has failed, shared by everything of it that blocks.
//
// A collective that was started can no longer be trusted once a rank left the common order, so all
// later ones throw until recover(). With it goes how long waits last (patience.h). Also the error
// type that tells a culprit from its victims.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "base/mutex.h"
#include "launch/patience.h"
#include "tessera/error.h"

namespace tessera::comm {

/// "100 s", "0.25 s": how messages name a timeout.
inline std::string in_seconds(std::chrono::milliseconds time) {
  return concat(static_cast<double>(time.count()) / 1000.0, " s");
}

/// A failure that began on another rank (it died, stalled, or said so): this rank's error only says
/// that it noticed. Own spawn prefers any other error when it looks for the culprit.
class PeerLost : public Error {
 public:
  explicit PeerLost(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

/// Threads: any.
class Poison {
 public:
  /// The first reason stays.
  void mark(const std::string& why) {
    const base::Lock lock(mutex_);
    if (set_.load(std::memory_order_relaxed)) return;
    why_ = why;
    ++marks_;
    set_.store(true, std::memory_order_release);
  }
  void clear() {
    const base::Lock lock(mutex_);
    set_.store(false, std::memory_order_release);
    why_.clear();
    suspicion_.clear();
  }
  /// What a wait has thrown and is on its way out of the step: whoever marks the World for that
  /// says it too, since an unwinding stack does not know its exception. The first one stays.
  void suspect(const std::string& why) {
    const base::Lock lock(mutex_);
    if (suspicion_.empty()) suspicion_ = why;
  }
  std::string suspicion() const {
    const base::Lock lock(mutex_);
    return suspicion_;
  }
  /// How often it was marked: what nobody waits for any more may look so seldom that it is cleared
  /// in between.
  std::uint64_t marks() const { return marks_; }
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  std::string why() const {
    const base::Lock lock(mutex_);
    return why_;
  }
  /// Errors: PeerLost (kComm) when marked.
  void check() const {
    if (is_set()) [[unlikely]]
      throw PeerLost(why());
  }

  Patience patience;

 private:
  std::atomic<bool> set_{false};
  std::atomic<std::uint64_t> marks_{0};
  mutable base::Mutex mutex_;
  std::string why_ TESSERA_GUARDED_BY(mutex_);
  std::string suspicion_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::comm
