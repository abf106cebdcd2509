// AbortFlag: the mark that a World has failed, shared by everything in it that blocks.
//
// A collective that was started can no longer be trusted once a rank has left the common order, so
// all later ones throw until recover(). LostRank is the error that tells a victim from the culprit.
//
// Patience says how long the waits of a World last, and what other ranks say they do meanwhile.
// Before the first step ranks have unequal work: one hashes data, another verifies the larger file.
// That says nothing about a collective, so waits are longer there, and an error says what the other
// ranks were busy with. A rank that is lost is a different case: the failure watch finds it as fast
// as later. Next: World::begin_start_up().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/mutex.h"
#include "tessera/error.h"

namespace tessera::comm {

/// Threads: any.
class Patience {
 public:
  /// Returns what a rank has said that it does; "" where it has said nothing, or waits as well.
  using WorkOf = std::function<std::string(int rank)>;

  /// From now on no wait ends before `longer`.
  void raise(std::chrono::milliseconds longer, WorkOf work_of);
  void lower();
  bool raised() const { return longer_ms_.load(std::memory_order_relaxed) > 0; }

  /// How long messages of other ranks about a failure may take: 1 s by default. [Note: watch times]
  /// [Note: watch times]
  void expect_words_within(std::chrono::milliseconds time);
  std::chrono::milliseconds words() const;

  /// The timeout of a wait that begins now and has the timeout `usual` in a step.
  std::chrono::milliseconds of(std::chrono::milliseconds usual) const;
  /// "; rank 0 was busy with: hashing the data; ...": what `ranks` (of the world) have said, and a
  /// remedy; "" where they have said nothing.
  std::string works_of(const std::vector<int>& ranks) const;
  /// The end of an error about ranks that did not come to a collective: works_of(), or what else
  /// may be the cause.
  std::string why_missing(const std::vector<int>& ranks) const;

 private:
  std::atomic<std::int64_t> longer_ms_{0};
  std::atomic<std::int64_t> words_ms_{1000};
  mutable base::Mutex mutex_;
  WorkOf work_of_ TESSERA_GUARDED_BY(mutex_);
};

/// "100 s", "0.25 s": how messages name a timeout.
inline std::string in_seconds(std::chrono::milliseconds time) {
  return concat(static_cast<double>(time.count()) / 1000.0, " s");
}

/// A failure that began on another rank (it died, stalled, or said so): this rank's error only says
/// that it noticed. Own spawn prefers any other error when it looks for the culprit.
class LostRank : public Error {
 public:
  explicit LostRank(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

/// Keeps errors of this thread in the library while it lives. The library throws them when the
/// program calls it next: until then the program does not know of them.
class KeepsErrors {
 public:
  KeepsErrors();
  ~KeepsErrors();
  KeepsErrors(const KeepsErrors&) = delete;
  KeepsErrors& operator=(const KeepsErrors&) = delete;
  static bool in_this_thread();
};

/// The flag also says that a World is over: closed, or a copy of the parent's in a child of fork().
/// Both are final, and errors of use (kUsage). Threads: any.
class AbortFlag {
 public:
  /// Marks the flag; the first reason stays.
  void mark(const std::string& why) {
    const base::Lock lock(mutex_);
    if (set_.load(std::memory_order_relaxed)) return;
    why_ = why;
    ++marks_;
    aborted_.store(true, std::memory_order_relaxed);
    set_.store(true, std::memory_order_release);
  }
  void clear() {
    const base::Lock lock(mutex_);
    if (is_over()) return;
    aborted_.store(false, std::memory_order_relaxed);
    set_.store(false, std::memory_order_release);
    acknowledged_.store(false, std::memory_order_relaxed);
    why_.clear();
    suspicion_.clear();
  }
  /// Notes an error that a wait has thrown and that still propagates. The thread that marks the
  /// World because of it reports it too, since an unwinding stack does not know its exception. The
  /// first one stays.
  void suspect(const std::string& why) {
    acknowledge();
    const base::Lock lock(mutex_);
    if (suspicion_.empty()) suspicion_ = why;
  }
  std::string suspicion() const {
    const base::Lock lock(mutex_);
    return suspicion_;
  }
  /// How often it was marked: a thread that was abandoned may read the flag so rarely that it is
  /// cleared in between.
  std::uint64_t marks() const { return marks_; }
  /// Whether it was marked, or the World is over.
  bool is_set() const { return set_.load(std::memory_order_acquire) || is_in_child(); }
  /// Whether it was marked.
  bool is_aborted() const { return aborted_.load(std::memory_order_relaxed); }

  /// Closes the World: from now on check() and raise() throw kUsage, whether it was marked or not.
  void close() {
    const base::Lock lock(mutex_);
    closed_.store(true, std::memory_order_relaxed);
    if (why_.empty()) why_ = kClosed;
    ++marks_;
    set_.store(true, std::memory_order_release);
  }
  /// Makes the World over in a child of fork(), which lacks its threads and connections.
  void belong_to_this_process() { forks_ = base::forks(); }
  bool is_in_child() const { return forks_ >= 0 && forks_ != base::forks(); }
  /// Errors: kUsage when the World is over; none when it was only marked.
  void require_not_over() const {
    if (is_over()) [[unlikely]]
      raise();
  }

  /// Runs the interrupt check where the wait of `timer` has lasted long enough. Errors: what the
  /// check throws, after the World has been told.
  void ask_interrupt(base::InterruptTimer& timer) const {
    if (timer.is_due()) [[unlikely]]
      ask_interrupt();
  }
  void ask_interrupt() const;
  /// Aborts the World. A wait that runs the check by itself calls it when it was interrupted.
  void tell_interrupted() const;
  /// Sets how an interrupt aborts the World; called in the thread that was interrupted.
  void when_interrupted(std::function<void()> abort);

  std::string why() const {
    const base::Lock lock(mutex_);
    return why_;
  }
  /// Errors: LostRank (kComm) when marked; kUsage when over. Acknowledges.
  void check() const {
    if (is_set()) [[unlikely]]
      raise();
  }
  /// Throws why it was marked; `what` was about to be done. Always throws: as check().
  [[noreturn]] void raise(const std::string& what = {}) const;
  /// Notes that the program knows of the abort, if there is one: an error has left the library
  /// since, or the program recovers by itself. Does nothing in a thread that keeps its errors.
  void acknowledge() const {
    if (!is_set() || KeepsErrors::in_this_thread()) return;
    acknowledged_.store(true, std::memory_order_relaxed);
  }
  bool acknowledged() const { return acknowledged_.load(std::memory_order_relaxed); }

  Patience patience;

 private:
  static constexpr const char* kClosed = "the World is closed";

  bool is_over() const { return closed_.load(std::memory_order_relaxed) || is_in_child(); }

  std::atomic<bool> set_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> closed_{false};
  std::atomic<int> forks_{-1};  ///< base::forks() of the process it belongs to; -1: to any
  mutable std::atomic<bool> acknowledged_{false};
  std::atomic<std::uint64_t> marks_{0};
  mutable base::Mutex mutex_;
  std::string why_ TESSERA_GUARDED_BY(mutex_);
  std::string suspicion_ TESSERA_GUARDED_BY(mutex_);
  std::function<void()> when_interrupted_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::comm
