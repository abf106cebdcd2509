// The library's side of set_interrupt_check (tessera/interrupt.h): who asks it, and when not.
//
// A wait asks through Interruptible, which counts its 100 ms, so that short waits pay one read of
// the clock at most. NoInterrupts keeps a thread of the library, a destructor and a part that must
// not be left in the middle from asking. Pure. Next: launch/abort_flag.h, which tells the World.
#pragma once

#include <chrono>

#include "tessera/interrupt.h"

namespace tessera::base {

/// Time between two questions of one wait, and before the first.
inline constexpr std::chrono::milliseconds kAsksEvery{100};

/// While it lives, this thread does not ask.
class NoInterrupts {
 public:
  NoInterrupts() { ++depth_; }
  ~NoInterrupts() { --depth_; }
  NoInterrupts(const NoInterrupts&) = delete;
  NoInterrupts& operator=(const NoInterrupts&) = delete;

  static bool in_this_thread() { return depth_ > 0; }

 private:
  static inline constinit thread_local int depth_ = 0;
};

/// Whether a check is set, and this thread may ask it. One read of an atomic where none is set.
bool may_ask_interrupt();
/// Asks. Errors: what the check throws.
void ask_interrupt();

}  // namespace tessera::base
