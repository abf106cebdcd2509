// The in-process backend: ranks are threads, collectives are additions and copies in shared memory.
//
// The steps that ranks run over Gloo, so the same bits (together.h), and stricter than any backend:
// the last rank to issue compares what all ranks mean and runs the steps of all of them, so that a
// swapped or missing collective is named at once, on every rank. It makes thousands of multi-rank
// cases affordable. Tensors on devices, of one or of several, are added and copied there, in rank
// order, on the groups' streams: that the thread of another rank launches on them is in order, since
// all ranks issue in one. Next: thread_ranks.h.
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

/// Where the ranks of one run meet. Threads: any.
class Rendezvous {
 public:
  explicit Rendezvous(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  std::unique_ptr<Group> make_group(const GroupPlace& place);
  /// Ends all waits (after every rank's AbortFlag was marked).
  void wake_all();
  /// Forgets everything under way; groups count from 0 again. Nothing may be in a call.
  void reset();
  /// Blocks until all `ranks` ranks called it. Errors: kComm after the timeout, or when a rank has
  /// left.
  void meet(int ranks);
  /// A rank has left by an exception and will meet nobody before reset().
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

/// The backend, on the threads' rendezvous. A run of threads repairs the rendezvous itself.
std::unique_ptr<Connections> open_in_process(Rendezvous& rendezvous);

}  // namespace tessera::comm
