// The library's side of set_interrupt_check (tessera/interrupt.h): which code calls the check, and
// when not.
//
// A wait that polls counts its 100 ms by an InterruptTimer; one that sleeps in another library is
// woken by WakesWait. Both cost one read of an atomic where no check is set. A wait of a World
// calls it through its AbortFlag, which tells the other ranks. NoInterrupts keeps a thread of the
// library, a destructor and a part that must not be left in the middle from calling it. Handlers
// that turn an exception into another error let an interrupt pass: handles_interrupt().
//
// Pure. Next: launch/abort_flag.h.
#pragma once

#include <chrono>

#include "base/pass_local.h"
#include "tessera/interrupt.h"

namespace tessera::base {

/// The time between two calls of the check in one wait, and before the first.
inline constexpr std::chrono::milliseconds kAsksEvery{100};

/// While it lives, this pass of the thread does not call the check.
class NoInterrupts {
 public:
  NoInterrupts() { ++Depth::here(); }
  ~NoInterrupts() { --Depth::here(); }
  NoInterrupts(const NoInterrupts&) = delete;
  NoInterrupts& operator=(const NoInterrupts&) = delete;

  static bool in_this_thread() { return Depth::here() > 0; }

 private:
  using Depth = PassLocal<PassValue::kNoInterrupts, int>;
};

/// Whether a check is set, and this thread may call it.
bool may_ask_interrupt();
/// Calls the check. Errors: those of the check.
void ask_interrupt();
/// Whether the exception that is handled is one that the check has thrown in this thread.
bool handles_interrupt();

/// The time of the next call of the check in a wait that begins with it.
class InterruptTimer {
 public:
  bool is_due() {
    if (!may_ask_interrupt()) return false;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return false;
    next_ = now + kAsksEvery;
    return true;
  }

 private:
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + kAsksEvery;
};

/// While it lives, a thread of the library wakes this thread's wait again and again after 100 ms,
/// so that it can call the check. Registers nothing where this thread may not call it.
class WakesWait {
 public:
  WakesWait(const WakesWait&) = delete;
  WakesWait& operator=(const WakesWait&) = delete;

 protected:
  WakesWait() = default;
  ~WakesWait() = default;
  /// Must be called by the derived class, at the end of its constructor and the beginning of its
  /// destructor.
  void begin();
  void end();

 private:
  friend class Waker;
  virtual void wake() = 0;  ///< on another thread

  bool is_registered_ = false;
};

/// Returns how many fork()s were made from the program's first process to this one, counted from
/// the first call. Objects with threads remember it, since a child has none of their threads.
int forks();

}  // namespace tessera::base
