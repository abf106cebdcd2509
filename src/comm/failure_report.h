// Failure report: a failing rank reports once and leaves, without destroying anything. The order
// matters: the parent and the other ranks must know before our sockets close, or they report a lost
// connection instead of its cause. [Note: failure] in failure_watch.h.
//
// An error that every rank of a launch finds alike is printed once. Each rank finds a wrong key or
// a missing file for itself, mostly before there is a World. The ranks agree through the store's
// failure key: the first one to write it prints. A rank that alone has an error prints it, too, and
// ends the others by that key.
#pragma once

#include <exception>
#include <functional>

#include "launch/failure_record.h"
#include "tessera/world.h"

namespace tessera::comm {

class ProcessWorld;
struct RunPlace;

/// For a rank that was refused before it joined, or for a process that may belong to no launch:
/// calls `print` unless another rank prints the same. Takes a few seconds at most
/// (WatchTimes::meeting); rank 0 serves the store for as long. Prints where no rank answers.
void refuse_once(const std::exception& error, int code, const std::function<void()>& print);

/// Prints "rank R: what" on stderr, in one line, tells own spawn's parent and the other ranks, and
/// leaves by _exit(code). An error that only noticed another rank's failure (LostRank) is printed
/// with that failure where it is known; one that another rank has announced word for word is not
/// printed again.
[[noreturn]] void report_failure(World& world, const std::exception& error, int code);

/// Leaves in the same way where this rank failed before it joined: it tells its parent, and calls
/// refuse_once().
[[noreturn]] void report_failure(const RunPlace& place, const std::exception& error, int code);

/// `undo` is called by report_failure and leave_after where this rank, or the one that ends it, was
/// refused: it removes what was made for a run that does not begin, after all have been told. It
/// has a second, so a disk that hangs delays no rank. A world of one calls nothing: its error
/// unwinds. Threads: `undo` is called on a separate thread; what it uses must live until the
/// process leaves.
void when_refused(World& world, std::function<void()> undo);

/// For threads that saw another rank fail: prints its error, and leaves with its exit code.
[[noreturn]] void leave_after(ProcessWorld& world, const FailureRecord& cause);

/// Exit code of an error outside the trainer: 2 for a wrong request, 1 for a failure.
int default_exit_code(const std::exception& error);

}  // namespace tessera::comm
