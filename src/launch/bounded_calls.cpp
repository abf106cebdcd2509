#include "launch/bounded_calls.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace tessera::comm {

struct BoundedCalls::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool hangs = false;
  bool stopping = false;
  std::thread thread;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !jobs.empty(); });
      if (jobs.empty() || hangs) return;
      auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // what it holds goes here, not while the lock is held
      lock.lock();
    }
  }
};

BoundedCalls::BoundedCalls() : state_(std::make_shared<State>()) {}

BoundedCalls::~BoundedCalls() {
  bool hangs = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    hangs = state_->hangs;
  }
  state_->changed.notify_all();
  if (!state_->thread.joinable()) return;
  if (hangs) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

bool BoundedCalls::post(std::function<void()> job) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->hangs) return false;
    if (!state_->thread.joinable()) {
      state_->thread = std::thread([state = state_] { state->work(); });
    }
    state_->jobs.push_back(std::move(job));
  }
  state_->changed.notify_one();
  return true;
}

void BoundedCalls::give_up() {
  const std::lock_guard lock(state_->mutex);
  state_->hangs = true;
}

}  // namespace tessera::comm
