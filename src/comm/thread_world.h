// ThreadWorld: a World whose ranks are threads of one process. Private to comm/.
//
// All ranks hang on one ThreadRun; poisoning one poisons all, at once. Next: thread_ranks.h.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/backends/backend.h"
#include "comm/backends/in_process/in_process.h"
#include "launch/failure_watch.h"
#include "launch/store.h"
#include "tessera/world.h"

namespace tessera::comm {

class ThreadWorld;

/// What the ranks share.
struct ThreadRun {
  ThreadRun(int ranks, ThreadBackend kind, const WorldOptions& what)
      : size(ranks), backend(kind), options(what), hub(what.timeout) {}

  const int size;
  const ThreadBackend backend;
  const WorldOptions options;
  Hub hub;
  const std::shared_ptr<Store> store = Store::in_memory(options.init_timeout);

  /// Marks every rank's World and ends all waits.
  void poison_all(const std::string& why);

  std::mutex mutex;  ///< of `worlds`
  std::vector<ThreadWorld*> worlds;
  int epoch = 0;
};

class ThreadWorld : public World {
 public:
  ThreadWorld(std::shared_ptr<ThreadRun> run, int rank);
  ~ThreadWorld() override;

  std::string backend() const override;
  void poison(const std::string& why) override;
  void recover() override;

  void poison_here(const std::string& why);
  void wake();
  /// This rank's share of a recovery: nothing may be under way on any rank.
  void repair(int epoch);

 protected:
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks,
                                    const std::string& name) override;

 private:
  std::shared_ptr<ThreadRun> run_;
  std::unique_ptr<Connections> connections_;
  std::unique_ptr<FailureWatch> watch_;
};

}  // namespace tessera::comm
