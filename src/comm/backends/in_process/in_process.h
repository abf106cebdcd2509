// The in-process backend: ranks are threads, collectives are additions and copies in shared memory.
//
// It runs the steps that ranks run over Gloo, so the bits are the same (together.h). It is stricter
// than any other backend: the last rank to issue compares what all ranks mean and runs the steps of
// all of them, so a swapped or missing collective is named at once, on every rank. It makes
// thousands of multi-rank cases affordable. Tensors on devices, of one or of several, are added and
// copied there, in rank order, on the groups' streams. Another rank's thread may launch on a
// stream: that is in order, since all ranks issue in one order. Next: thread_ranks.h.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/backend.h"
#include "comm/group.h"
#include "launch/abort_flag.h"

namespace tessera::comm {

/// The place where the ranks of one run meet. Threads: any.
class Rendezvous {
 public:
  explicit Rendezvous(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  std::unique_ptr<Group> make_group(const GroupPlace& place);
  /// Ends all waits, after every rank's AbortFlag was marked.
  void wake_all();
  /// Forgets everything in flight; groups count from 0 again. No rank may be in a call.
  void reset();
  /// Blocks until all `ranks` ranks have called it. Errors: kComm after the timeout, or when a rank
  /// has left.
  void meet(int ranks);
  /// Records that a rank has left by an exception and meets no rank before reset().
  void abandon();

  struct Collective;
  struct SharedGroup;

 private:
  friend class InProcessGroup;
  std::shared_ptr<SharedGroup> shared(const std::string& name, const std::vector<int>& members);

  const std::chrono::milliseconds timeout_;
  base::Mutex mutex_;
  base::Condition met_;
  int arrived_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool abandoned_ TESSERA_GUARDED_BY(mutex_) = false;
  std::uint64_t round_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::shared_ptr<SharedGroup>> shared_groups_ TESSERA_GUARDED_BY(mutex_);
};

/// Opens the backend on the threads' rendezvous. A run of threads repairs the rendezvous itself.
std::unique_ptr<Connections> open_in_process(Rendezvous& rendezvous);

}  // namespace tessera::comm
