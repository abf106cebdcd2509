// set_interrupt_check(): a check of the host program that runs while a call waits for other ranks.
//
// A program in another language sees Ctrl-C or its own timers only when its interpreter runs, and a
// wait for other ranks can last minutes. The thread that waits calls the check, and an exception of
// the check leaves the call after the library's clean-up. The check is no signal handler; the
// library installs none. Next: world.h.
#pragma once

#include <functional>

namespace tessera {

/// Sets the function that waiting calls of this process call at least every 100 ms, from the first
/// 100 ms of a wait on. An empty function, the default, checks nothing. Where the check throws, the
/// World is aborted ("interrupted"), so that the waits of other ranks end with an error too, and
/// the exception leaves the call with its own type. Threads of the library, destructors, and parts
/// of a call that must complete do not call it. Threads: any; every waiting thread calls `check`,
/// also two at once.
void set_interrupt_check(std::function<void()> check);

}  // namespace tessera
