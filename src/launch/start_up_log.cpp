#include "launch/start_up_log.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::comm {

StartUpLog::StartUpLog(std::shared_ptr<const WaitBoard> board, std::chrono::milliseconds every,
                       Works works, std::function<void(const std::string&)> say)
    : board_(std::move(board)),
      every_(every),
      works_(std::move(works)),
      say_(std::move(say)),
      thread_([this] { run(); }) {}

StartUpLog::~StartUpLog() {
  {
    const base::Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void StartUpLog::run() {
  base::Lock lock(mutex_);
  while (!wake_.wait_for(lock, every_, [&]() TESSERA_REQUIRES(mutex_) { return stopping_; })) {
    lock.unlock();
    const auto waited = board_->standing().waited;
    if (waited >= every_) {
      const std::string works = works_();
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(waited).count();
      if (!works.empty()) say_(concat("start-up: waiting for ", seconds, " s: ", works));
    }
    lock.lock();
  }
}

}  // namespace tessera::comm
