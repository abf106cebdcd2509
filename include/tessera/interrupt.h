// A host program's check while a call of the library waits for other ranks.
//
// A program in another language sees Ctrl-C or a timer of its own only when its interpreter runs,
// and a wait for other ranks can last minutes. The check is called by the thread that waits, and
// what it throws leaves the call as it is, behind the library's own clean-up. Not a signal handler:
// the library installs none. Next: world.h.
#pragma once

#include <functional>

namespace tessera {

/// Sets what a waiting call asks, in the whole process: at least every 100 ms of a wait, from its
/// first 100 ms on. An empty function asks nothing, which is the default. Where the check throws,
/// the World is aborted ("interrupted": the other ranks' waits end with an error, too), and the
/// exception leaves the call with its own type. Threads of the library, destructors and the parts
/// of a call that have to be brought to their end do not ask. Threads: any; `check` is called by
/// every thread that waits, also by two at once.
void set_interrupt_check(std::function<void()> check);

}  // namespace tessera
