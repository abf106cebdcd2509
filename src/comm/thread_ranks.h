// ThreadRanks: ranks as threads that stay, for grids of thousands of multi-rank cases.
//
// launch_threads() makes one, runs one body and destroys it; a test makes one and runs many bodies:
// the threads, their Worlds and their groups (also Gloo's connections) are kept between bodies. An
// error in a body aborts the run, frees the other ranks, and is repaired before the next body.
#pragma once

#include <functional>
#include <memory>

#include "tessera/world.h"

namespace tessera::comm {

class ThreadRanks {
 public:
  /// Errors: kUsage for fewer than one rank; kComm.
  ThreadRanks(int ranks, ThreadBackend backend, const WorldOptions& options = {});
  ~ThreadRanks();
  ThreadRanks(const ThreadRanks&) = delete;
  ThreadRanks& operator=(const ThreadRanks&) = delete;

  /// Runs `body` once on every rank and returns when all are done. Rethrows the first error by
  /// time. Threads: one at a time.
  void run(const std::function<void(World&)>& body);

  int size() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
