// StartUpLog: a line now and then while a rank waits in a start-up, with what the others do.
//
// Minutes without a word look like a run that hangs. One thread, on rank 0 alone, from
// World::begin_start_up() to end_start_up(). Next: patience.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "launch/wait_board.h"

namespace tessera::comm {

class StartUpLog {
 public:
  /// What stands in the line: "" for no line. Called on the thread; must not throw.
  using Works = std::function<std::string()>;

  /// A line goes to `say` every so often while the longest wait on `board` is as long.
  StartUpLog(std::shared_ptr<const WaitBoard> board, std::chrono::milliseconds every, Works works,
             std::function<void(const std::string&)> say);
  ~StartUpLog();
  StartUpLog(const StartUpLog&) = delete;
  StartUpLog& operator=(const StartUpLog&) = delete;

 private:
  void run();

  const std::shared_ptr<const WaitBoard> board_;
  const std::chrono::milliseconds every_;
  const Works works_;
  const std::function<void(const std::string&)> say_;
  base::Mutex mutex_;
  base::Condition wake_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera::comm
