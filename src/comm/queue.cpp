#include "comm/queue.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <deque>
#include <exception>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "base/one_line.h"
#include "base/test_hooks.h"
#include "comm/traced_collective.h"
#include "launch/poison.h"
#include "tessera/error.h"

namespace tessera::comm {

struct Pending::State {
  explicit State(std::shared_ptr<Poison> poisoned) : poison(std::move(poisoned)) {}

  void issued(std::unique_ptr<Work> started, std::exception_ptr error) {
    work = std::move(started);
    failure = std::move(error);
    out.store(true, std::memory_order_release);
    out.notify_all();
  }

  std::atomic<bool> out{false};  // issued, or never going to be
  std::unique_ptr<Work> work;
  std::exception_ptr failure;
  std::shared_ptr<Poison> poison;
  std::unique_ptr<TracedCollective> traced;  // null: nobody looks
};

void Pending::wait() {
  if (!state_) return;
  RECORD_USER_SCOPE("tessera::wait");
  const auto begin = state_->traced ? TraceClock::now() : TraceClock::time_point();
  state_->out.wait(false, std::memory_order_acquire);
  try {
    if (state_->failure) std::rethrow_exception(state_->failure);
    if (!state_->work) return;
    state_->poison->check();
    state_->work->wait();
  } catch (const PeerLost& error) {
    state_->poison->suspect(error.what());
    throw;
  }
  state_->work.reset();
  if (state_->traced) state_->traced->waited_since(begin);
}

namespace {

struct Submission {
  Group* group;
  Batch batch;
  std::function<void()> ready;
  std::shared_ptr<Pending::State> state;
};

}  // namespace

struct IssueQueue::Impl {
  Pending submit(Submission submission);
  void run();
  void issue(Submission submission);
  void drop(std::deque<Submission> dropped);
  const std::shared_ptr<Poison> poison = std::make_shared<Poison>();
  base::Mutex mutex;
  base::Condition changed;
  base::Condition emptied;
  std::deque<Submission> waiting TESSERA_GUARDED_BY(mutex);
  bool busy TESSERA_GUARDED_BY(mutex) = false;  // one is being issued
  bool stopping TESSERA_GUARDED_BY(mutex) = false;
  std::optional<Submission> held_back;  // of the thread, while it is busy
  std::thread thread;
};

void IssueQueue::Impl::issue(Submission submission) {
  const c10::AutoGradMode no_grad(false);
  std::unique_ptr<Work> work;
  std::exception_ptr failure;
  try {
    poison->check();
    if (submission.ready) submission.ready();
    if (submission.state->traced) submission.state->traced->issued();
    work = submission.group->issue(std::move(submission.batch));
  } catch (const std::exception& error) {
    failure = std::current_exception();
    // Whatever comes after it would meet other collectives on the other ranks.
    poison->mark(concat("a collective could not be issued: ", one_line(error.what())));
  } catch (...) {
    failure = std::current_exception();
    poison->mark("a collective could not be issued");
  }
  submission.state->issued(std::move(work), failure);
}

void IssueQueue::Impl::drop(std::deque<Submission> dropped) {
  if (dropped.empty()) return;
  const auto why = std::make_exception_ptr(PeerLost(poison->why()));
  for (Submission& one : dropped) one.state->issued(nullptr, why);
}

void IssueQueue::Impl::run() {
  base::Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&]() TESSERA_REQUIRES(mutex) { return stopping || !waiting.empty(); });
    if (waiting.empty()) {
      if (!held_back) return;
      waiting.push_back(std::move(*held_back));
      held_back.reset();
    }
    Submission next = std::move(waiting.front());
    waiting.pop_front();
    busy = true;
    const bool may_hold = !stopping && !held_back;
    lock.unlock();
    const auto hold = test_hooks::hold_back.get();
    if (hold && may_hold && (*hold)(*next.group, next.batch.label)) {
      held_back = std::move(next);
    } else {
      issue(std::move(next));
      if (held_back) issue(std::move(*std::exchange(held_back, std::nullopt)));
    }
    lock.lock();
    busy = false;
    if (waiting.empty()) emptied.notify_all();
  }
}

Pending IssueQueue::Impl::submit(Submission submission) {
  auto state = submission.state;
  state->traced = TracedCollective::of(submission.batch, *submission.group);
  if (submission.group->size() == 1) {  // nobody to keep an order with
    issue(std::move(submission));
    return Pending(std::move(state));
  }
  {
    const base::Lock lock(mutex);
    TESSERA_INVARIANT(!stopping, "queue: ", submission.batch.label.unit, " came after the end");
    if (!thread.joinable()) thread = std::thread([this] { run(); });
    waiting.push_back(std::move(submission));
  }
  changed.notify_one();
  return Pending(std::move(state));
}

IssueQueue::IssueQueue() : impl_(std::make_unique<Impl>()) {}

IssueQueue::~IssueQueue() { stop(); }

void IssueQueue::stop() {
  {
    const base::Lock lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
}

Pending IssueQueue::submit(Group& group, Batch batch, std::function<void()> ready) {
  impl_->poison->check();
  return impl_->submit({&group, std::move(batch), std::move(ready),
                        std::make_shared<Pending::State>(impl_->poison)});
}

void IssueQueue::drain() {
  base::Lock lock(impl_->mutex);
  impl_->emptied.wait(lock, [&]() TESSERA_REQUIRES(impl_->mutex) {
    return impl_->waiting.empty() && !impl_->busy;
  });
}

void IssueQueue::poison(const std::string& why) {
  impl_->poison->mark(why);
  std::deque<Submission> dropped;
  {
    const base::Lock lock(impl_->mutex);
    dropped.swap(impl_->waiting);
    if (!impl_->busy) impl_->emptied.notify_all();
  }
  impl_->drop(std::move(dropped));
}

void IssueQueue::recover() {
  drain();
  {
    const base::Lock lock(impl_->mutex);
    impl_->held_back.reset();
  }
  impl_->poison->clear();
}

}  // namespace tessera::comm
