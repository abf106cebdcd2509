#include "launch/bounded_calls.h"

#include <deque>
#include <thread>

#include "base/interrupt.h"
#include "base/mutex.h"

namespace tessera::comm {

struct BoundedCalls::State {
  base::Mutex mutex;
  base::Condition changed;
  std::deque<std::function<void()>> jobs TESSERA_GUARDED_BY(mutex);
  bool hangs TESSERA_GUARDED_BY(mutex) = false;
  bool stopping TESSERA_GUARDED_BY(mutex) = false;
  std::thread thread;

  void work() {
    const base::NoInterrupts of_the_library;
    base::Lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&]() TESSERA_REQUIRES(mutex) { return stopping || !jobs.empty(); });
      if (jobs.empty() || hangs) return;
      auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // destroys what it holds here, without the lock
      lock.lock();
    }
  }
};

BoundedCalls::BoundedCalls() : state_(std::make_shared<State>()) {}

BoundedCalls::~BoundedCalls() {
  bool hangs = false;
  {
    const base::Lock lock(state_->mutex);
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
    const base::Lock lock(state_->mutex);
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
  const base::Lock lock(state_->mutex);
  state_->hangs = true;
}

}  // namespace tessera::comm
