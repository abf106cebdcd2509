// An error that every rank of a launch comes to alike, said once.
//
// A wrong key or a missing file is found by each rank for itself, mostly before there is a World.
// The ranks agree through the store's failure key: the first one to write it prints. A rank that is
// alone in its trouble prints too, and ends the others by that key. Next: failure_report.h, for
// ranks that have joined a World.
#pragma once

#include <exception>
#include <functional>

#include "launch/failure_record.h"
#include "launch/launch_environment.h"

namespace tessera::comm {

/// Whether `standing`, what the failure key says, makes it needless for this rank to print
/// `record`.
bool says_the_same(const FailureRecord& standing, const FailureRecord& record);

/// For a rank that was refused before it joined: calls `print` unless another rank says the same.
/// Takes a few seconds at most (WatchTimes::meeting); rank 0 serves the store for as long. Prints
/// where nobody answers.
void refuse_once(const LaunchEnvironment& launch, const FailureRecord& record,
                 const std::function<void()>& print);

/// The same for an error of this process, which may be of no launch at all.
void refuse_once(const std::exception& error, int code, const std::function<void()>& print);

/// A launcher that sees one rank end sends SIGTERM to the others: it must not cut short what this
/// one is about to say. For processes that are leaving.
void finish_report();

}  // namespace tessera::comm
