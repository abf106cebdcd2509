#include "comm/queue.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <thread>

#include "base/interrupt.h"
#include "base/mutex.h"
#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "base/trace.h"
#include "comm/batch.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"

namespace tessera::comm {

/// One collective of a traced step, from its submission to the end of the wait for it. It shows
/// what this rank knows: when it was issued, and when some thread here had waited for it. Made only
/// while there is a trace.
class TracedCollective {
 public:
  /// Called on the submitting thread; returns null where nothing is traced.
  static std::unique_ptr<TracedCollective> of(const Batch& batch, const Group& group);

  /// Called on the issuing thread, when the batch is issued.
  void issued();
  /// Called when it is complete; this thread has waited for it since `begin`.
  void waited_since(TraceClock::time_point begin);

 private:
  std::shared_ptr<Trace> trace_;
  TraceSpan span_;
  TraceClock::time_point submitted_;
};

namespace {

TraceRow row_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return TraceRow::kGathers;
    case Kind::kReduceScatter:
      return TraceRow::kReductions;
    case Kind::kAllReduce:
    case Kind::kAllToAll:
    case Kind::kAnyOf:
    case Kind::kSumOf:
    case Kind::kBroadcast:
    case Kind::kBarrier:
    case Kind::kBatch:
      break;
  }
  return TraceRow::kReplicas;
}

double in_ms(TraceClock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

std::uint32_t bucket_of(const Op& op, std::uint32_t otherwise) {
  return std::visit([&](const auto& one) { return one.bucket_or(otherwise); }, op);
}

}  // namespace

std::unique_ptr<TracedCollective> TracedCollective::of(const Batch& batch, const Group& group) {
  Trace* const trace = current_trace();
  if (trace == nullptr) return nullptr;
  auto traced = std::make_unique<TracedCollective>();
  traced->trace_ = trace->shared_from_this();
  traced->submitted_ = TraceClock::now();
  TraceSpan& span = traced->span_;
  span.row = row_of(batch.label.kind);
  span.name = unit_label(batch.label.unit);
  Entry entry;
  describe(batch, 0, entry);
  std::int64_t bytes = 0;
  for (const OpFacts& op : entry.ops) bytes += op.bytes;
  span.arguments = {{"kind", std::string(to_string(batch.label.kind))},
                    {"unit", span.name},
                    {"micro_batch", std::int64_t{batch.label.micro_batch}},
                    {"buffer_bytes", bytes},
                    {"sent_bytes", sent_bytes(batch, group.size(), group.rank())}};
  for (std::size_t i = 0; i < entry.ops.size(); ++i) {
    span.arguments.emplace_back(
        concat("bucket ", bucket_of(batch.ops[i], static_cast<std::uint32_t>(i))),
        concat(entry.ops[i].bytes, " B ", c10::toString(entry.ops[i].wire)));
  }
  return traced;
}

void TracedCollective::issued() {
  span_.begin = trace_->now();
  span_.arguments.emplace_back("queued_ms", in_ms(span_.begin - submitted_));
}

void TracedCollective::waited_since(TraceClock::time_point begin) {
  span_.end = trace_->now();
  span_.arguments.emplace_back("waited_ms", in_ms(span_.end - begin));
  trace_->add({TraceRow::kWaits, span_.name, begin, span_.end, {span_.arguments.front()}});
  trace_->add(std::move(span_));
}

struct Pending::State {
  State(std::shared_ptr<AbortFlag> flag, std::shared_ptr<AbortFlag> world_flag)
      : abort_flag(std::move(flag)), world_abort_flag(std::move(world_flag)) {}

  void issued(std::unique_ptr<Work> started, std::exception_ptr error) {
    work = std::move(started);
    failure = std::move(error);
    out.store(kOut, std::memory_order_release);
    out.notify_all();
  }
  /// Blocks until issued() was called. Errors: those of the interrupt check; kUsage in a child of
  /// fork().
  void wait_until_out();

  static constexpr int kOut = -1;
  std::atomic<int> out{0};  // kOut: issued, or never to be; else how often it was woken
  std::unique_ptr<Work> work;
  std::exception_ptr failure;
  const std::shared_ptr<AbortFlag> abort_flag;
  const std::shared_ptr<AbortFlag> world_abort_flag;
  std::unique_ptr<TracedCollective> traced;  // null: not traced
};

namespace {

/// Wakes a thread that waits for a collective which the queue has not issued yet.
class WakesIssueWait final : public base::WakesWait {
 public:
  WakesIssueWait(std::atomic<int>& out, int issued) : out_(out), issued_(issued) { begin(); }
  ~WakesIssueWait() { end(); }

 private:
  void wake() override {
    int woken = out_.load(std::memory_order_relaxed);
    if (woken == issued_) return;
    const int next = woken == std::numeric_limits<int>::max() ? 0 : woken + 1;
    if (out_.compare_exchange_strong(woken, next)) out_.notify_all();
  }

  std::atomic<int>& out_;
  const int issued_;
};

}  // namespace

void Pending::State::wait_until_out() {
  int now = out.load(std::memory_order_acquire);
  if (now == kOut) return;
  // The issuing thread exists only in the parent.
  if (world_abort_flag->is_in_child()) world_abort_flag->raise();
  const WakesIssueWait wakes(out, kOut);
  base::InterruptTimer timer;
  for (; now != kOut; now = out.load(std::memory_order_acquire)) {
    out.wait(now, std::memory_order_acquire);
    world_abort_flag->ask_interrupt(timer);
  }
}

void Pending::wait() {
  if (!state_) return;
  RECORD_USER_SCOPE("tessera::wait");
  const auto begin = state_->traced ? TraceClock::now() : TraceClock::time_point();
  state_->wait_until_out();
  try {
    if (state_->failure) std::rethrow_exception(state_->failure);
    if (!state_->work) return;
    // Finished or not: once a rank has left the common order, what arrived may belong to another of
    // its collectives.
    state_->abort_flag->check();
    state_->work->wait();
  } catch (const LostRank& error) {
    state_->world_abort_flag->suspect(error.what());
    throw;
  } catch (...) {
    state_->world_abort_flag->acknowledge();
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
  explicit Impl(std::shared_ptr<AbortFlag> world_flag) : world_abort_flag(std::move(world_flag)) {}

  Pending submit(Submission submission);
  void run();
  void issue(Submission submission);
  void drop(std::deque<Submission> dropped);
  const std::shared_ptr<AbortFlag> abort_flag = std::make_shared<AbortFlag>();
  const std::shared_ptr<AbortFlag> world_abort_flag;
  base::Mutex mutex;
  base::Condition changed;
  base::Condition emptied;
  base::Mutex launching;  // held by a thread that issues on its rank's device
  std::deque<Submission> waiting TESSERA_GUARDED_BY(mutex);
  bool busy TESSERA_GUARDED_BY(mutex) = false;  // one is being issued
  bool stopping TESSERA_GUARDED_BY(mutex) = false;
  std::optional<Submission> held_back;  // kept for the thread while it is busy
  std::thread thread;
};

void IssueQueue::Impl::issue(Submission submission) {
  const c10::AutoGradMode no_grad(false);
  const KeepsErrors until_waited_for;
  std::unique_ptr<Work> work;
  std::exception_ptr failure;
  try {
    abort_flag->check();
    const auto ready = [&] {
      if (submission.ready) submission.ready();
      if (submission.state->traced) submission.state->traced->issued();
    };
    work = submission.group->issue(std::move(submission.batch), ready);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    // Every later collective would meet other collectives on the other ranks.
    abort_flag->mark(concat("a collective could not be issued: ", one_line(error.what())));
  } catch (...) {
    failure = std::current_exception();
    abort_flag->mark("a collective could not be issued");
  }
  submission.state->issued(std::move(work), failure);
}

void IssueQueue::Impl::drop(std::deque<Submission> dropped) {
  if (dropped.empty()) return;
  const auto why = std::make_exception_ptr(LostRank(abort_flag->why()));
  for (Submission& one : dropped) one.state->issued(nullptr, why);
}

void IssueQueue::Impl::run() {
  const base::NoInterrupts of_the_library;
  base::Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&]() TESSERA_REQUIRES(mutex) {
      return stopping || !waiting.empty() || (held_back && abort_flag->is_set());
    });
    if (waiting.empty()) {
      if (!held_back) return;
      waiting.push_back(std::move(*held_back));
      held_back.reset();
    }
    Submission next = std::move(waiting.front());
    waiting.pop_front();
    busy = true;
    const bool may_hold = !stopping && !held_back && !abort_flag->is_set();
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
  // A group of one rank needs no order, and this thread keeps the order of the rest.
  if (submission.group->size() == 1) {
    issue(std::move(submission));
    return Pending(std::move(state));
  }
  // The tensors of a dry run have values only on the thread of their rank.
  if (submission.group->stream() || submission.group->is_dry()) {
    const base::Lock lock(launching);
    issue(std::move(submission));
    // Thrown at once, and unchanged: the next submission would say only that the queue has ended,
    // and only the error's type tells whether memory has run out.
    if (state->failure) Pending(state).wait();
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

IssueQueue::IssueQueue(std::shared_ptr<AbortFlag> world_abort_flag)
    : impl_(std::make_unique<Impl>(world_abort_flag ? std::move(world_abort_flag)
                                                    : std::make_shared<AbortFlag>())) {}

IssueQueue::~IssueQueue() { stop(); }

void IssueQueue::stop() {
  {
    const base::Lock lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
}

void IssueQueue::close() {
  stop();
  impl_->abort_flag->close();
}

void IssueQueue::belong_to_this_process() { impl_->abort_flag->belong_to_this_process(); }

Pending IssueQueue::submit(Group& group, Batch batch, std::function<void()> ready) {
  if (impl_->abort_flag->is_set()) {
    impl_->world_abort_flag->acknowledge();
    impl_->abort_flag->raise();
  }
  note_pass(batch.label);
  return impl_->submit(
      {&group, std::move(batch), std::move(ready),
       std::make_shared<Pending::State>(impl_->abort_flag, impl_->world_abort_flag)});
}

void IssueQueue::drain() {
  base::Lock lock(impl_->mutex);
  impl_->emptied.wait(lock, [&]() TESSERA_REQUIRES(impl_->mutex) {
    return impl_->waiting.empty() && !impl_->busy;
  });
}

void IssueQueue::abort(const std::string& why) {
  impl_->abort_flag->mark(why);
  std::deque<Submission> dropped;
  {
    const base::Lock lock(impl_->mutex);
    dropped.swap(impl_->waiting);
    if (!impl_->busy) impl_->emptied.notify_all();
  }
  impl_->changed.notify_all();
  impl_->drop(std::move(dropped));
}

void IssueQueue::recover() {
  drain();
  {
    const base::Lock lock(impl_->mutex);
    impl_->held_back.reset();
  }
  impl_->abort_flag->clear();
}

}  // namespace tessera::comm
