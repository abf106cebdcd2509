// The library's side of set_interrupt_check (tessera/interrupt.h): who asks it, and when not.
//
// A wait that looks up now and then counts its 100 ms by an InterruptTimer; one that sleeps in
// another library is woken by WakesWait. Both cost one read of an atomic where no check is set. A
// wait of a World asks through its AbortFlag, which tells the other ranks. NoInterrupts keeps a
// thread of the library, a destructor and a part that must not be left in the middle from asking.
// Handlers that make another error of what they catch let an interrupt pass: handles_interrupt().
//
// Pure. Next: launch/abort_flag.h.
#pragma once

#include <chrono>

#include "base/pass_local.h"
#include "tessera/interrupt.h"

namespace tessera::base {

/// Time between two questions of one wait, and before the first.
inline constexpr std::chrono::milliseconds kAsksEvery{100};

/// While it lives, this pass of the thread does not ask.
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

/// Whether a check is set, and this thread may ask it.
bool may_ask_interrupt();
/// Asks. Errors: what the check throws.
void ask_interrupt();
/// Inside a handler: whether what it handles is what the check has thrown in this thread.
bool handles_interrupt();

/// When the wait that begins with it asks next.
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

/// While it lives, a thread of the library wakes this thread's wait again and again once it has
/// lasted 100 ms, so that it can ask. Registers nothing where this thread may not ask.
class WakesWait {
 public:
  WakesWait(const WakesWait&) = delete;
  WakesWait& operator=(const WakesWait&) = delete;

 protected:
  WakesWait() = default;
  ~WakesWait() = default;
  /// By the derived class, as its constructor ends and as its destructor begins.
  void begin();
  void end();

 private:
  friend class Waker;
  virtual void wake() = 0;  ///< on another thread

  bool is_registered_ = false;
};

/// How many fork()s lie between the program's first process and this one, counted from the first
/// call on: objects with threads remember it, since a child has none of them.
int forks();

}  // namespace tessera::base
