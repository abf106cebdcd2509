#include "comm/thread_ranks.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/text/printable.h"
#include "base/threads/cores.h"
#include "base/threads/parallel.h"
#include "comm/backends/backend.h"
#include "comm/backends/in_process/in_process.h"
#include "comm/device.h"
#include "comm/process_world.h"
#include "comm/queue.h"
#include "launch/failure_record.h"
#include "launch/failure_watch.h"
#include "launch/store.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::comm {

class ThreadWorld;

/// The state that the ranks share.
struct ThreadRun {
  ThreadRun(int ranks, ThreadBackend kind, const WorldOptions& what)
      : size(ranks), backend(backend_of(kind)), options(what), rendezvous(what.timeout) {
    backend.require_carries(device_of_rank(options.device, 0).type());
  }

  const int size;
  const BackendRow& backend;
  const WorldOptions options;
  Rendezvous rendezvous;
  const std::shared_ptr<Store> store = Store::in_memory(options.init_timeout);

  /// Marks every rank's World and ends all waits.
  void abort_all(const std::string& why);
  /// Does nothing where the epoch of the finding is over.
  void abort_all_in(int epoch_of_finding, const std::string& why);
  int begin_epoch();  ///< called by one rank for all, after a failure
  int present_epoch();

  base::Mutex mutex;
  std::vector<ThreadWorld*> worlds TESSERA_GUARDED_BY(mutex);

 private:
  void abort_each(const std::string& why) TESSERA_REQUIRES(mutex);

  int epoch_ TESSERA_GUARDED_BY(mutex) = 0;
};

/// A World whose ranks are threads of one process. All ranks share one ThreadRun, so aborting one
/// rank aborts all, at once.
class ThreadWorld : public World {
 public:
  ThreadWorld(std::shared_ptr<ThreadRun> run, int rank);
  ~ThreadWorld() override;

  std::string backend() const override;
  void close() override;
  void close_failed(const std::string& why) override {
    abort(why);
    close();
  }
  void abort_epoch(std::uint64_t epoch, const std::string& why) override;
  void recover() override;

  void abort_here(const std::string& why);
  /// Whether an error of its rank only repeats why others have aborted this World.
  bool repeats_abort(const std::string& error) const;
  void wake();
  /// Called by its thread, as it ends: ends what the backend ends on all ranks together.
  void end_connections();
  /// This rank's part of a recovery; nothing may be in flight on any rank.
  void repair(int epoch);

 protected:
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const at::Device& where) override;

 private:
  std::shared_ptr<ThreadRun> run_;
  std::unique_ptr<Connections> connections_;
  std::unique_ptr<Connections> messages_;  ///< for control messages, where the backend carries none
  std::unique_ptr<FailureWatch> watch_;
};

void ThreadRun::abort_all(const std::string& why) {
  const base::Lock lock(mutex);
  abort_each(why);
}

void ThreadRun::abort_all_in(int epoch_of_finding, const std::string& why) {
  const base::Lock lock(mutex);
  if (epoch_of_finding == epoch_) abort_each(why);
}

int ThreadRun::begin_epoch() {
  const base::Lock lock(mutex);
  return ++epoch_;
}

int ThreadRun::present_epoch() {
  const base::Lock lock(mutex);
  return epoch_;
}

void ThreadRun::abort_each(const std::string& why) {
  for (ThreadWorld* world : worlds) world->abort_here(why);
  rendezvous.wake_all();
  for (ThreadWorld* world : worlds) world->wake();
}

ThreadWorld::ThreadWorld(std::shared_ptr<ThreadRun> run, int rank)
    : World(rank, run->size, rank, run->options), run_(std::move(run)) {
  state_->store = run_->store;
  state_->init_timeout = run_->options.init_timeout;
  state_->abort_flag->when_interrupted([this] { abort("interrupted while it waited"); });
  // A backend that connects processes needs the same between threads.
  const bool as_processes = run_->backend.connects_processes() && size_ > 1;
  connections_ =
      as_processes ? run_->backend.open(LaunchEnvironment{}) : open_in_process(run_->rendezvous);
  if (!run_->backend.carries(at::kCPU)) messages_ = open_in_process(run_->rendezvous);
  if (as_processes) {
    WatchOptions watch = watch_options(rank, run_->size);
    watch.blocked_after = run_->options.blocked_after;
    watch.poll = std::min(watch.poll, watch.blocked_after / 4 + std::chrono::milliseconds(1));
    state_->abort_flag->patience.expect_words_within(WatchTimes{watch.poll}.words());
    state_->board->watch(all_ranks(size_));
    FailureWatch::Actions actions;
    actions.failed = actions.lost = [this](const std::string& why) { run_->abort_all(why); };
    actions.disagree = [this](const std::string& why, int epoch) {
      run_->abort_all_in(epoch, why);
    };
    // abort_all() aborts all ranks at once, and a thread cannot be ended.
    watch_ = std::make_unique<FailureWatch>(run_->store, state_->board, watch, std::move(actions));
  }
  const base::Lock lock(run_->mutex);
  run_->worlds.push_back(this);
}

ThreadWorld::~ThreadWorld() {
  if (watch_) watch_->stop();
  {
    const base::Lock lock(run_->mutex);
    std::erase(run_->worlds, this);
  }
  stop_queue();
}

std::string ThreadWorld::backend() const {
  return size_ == 1 ? "none" : std::string(run_->backend.name);
}

void ThreadWorld::abort_epoch(std::uint64_t epoch, const std::string& why) {
  if (closed_) return;
  // Recoveries and epochs have the same numbers.
  run_->abort_all_in(static_cast<int>(epoch), of_rank(rank_, one_line(why)));
}

/// The other ranks are threads of this process: nothing that they use ends with this rank's World.
void ThreadWorld::close() {
  if (closed_.exchange(true)) return;
  queue_->close();
  state_->abort_flag->close();
}

void ThreadWorld::abort_here(const std::string& why) {
  state_->abort_flag->mark(why);
  queue_->abort(why);
}

bool ThreadWorld::repeats_abort(const std::string& error) const {
  const std::string why = state_->abort_flag->why();
  return !why.empty() && error.find(why) != std::string::npos;
}

void ThreadWorld::wake() { state_->board->abort_all(); }

void ThreadWorld::end_connections() {
  if (messages_ && !aborted()) connections_->close();  // otherwise destructors do
}

void ThreadWorld::recover() {
  state_->abort_flag->require_not_over();
  connections_->require_recovery();
  if (!aborted()) abort(kRecovers);
  queue_->drain();               // its thread may still be inside a collective
  run_->rendezvous.meet(size_);  // from here on no rank is in one
  if (rank_ == 0) {
    run_->begin_epoch();
    run_->rendezvous.reset();
  }
  run_->rendezvous.meet(size_);
  repair(run_->present_epoch());
  run_->rendezvous.meet(size_);  // a rank that resumes meets no half-repaired rank
}

void ThreadWorld::repair(int epoch) {
  queue_->recover();
  connections_->reset(epoch);
  if (watch_) watch_->set_epoch(epoch);
  ++recoveries_;
  state_->abort_flag->clear();
}

std::shared_ptr<Group> ThreadWorld::make_group(const std::vector<int>& ranks,
                                               const std::string& name, const at::Device& where) {
  Connections& connections = messages_ && where.is_cpu() ? *messages_ : *connections_;
  return connections.make_group(
      {name, ranks, rank_, where, run_->options, run_->store, state_->abort_flag, state_->board});
}

struct ThreadRanks::Impl {
  explicit Impl(std::shared_ptr<ThreadRun> what) : run(std::move(what)) {}
  ~Impl();  ///< also where one of the threads could not be started

  void serve(int rank);
  void attempt(World& world, const std::function<void(World&)>& body);
  void fail(std::exception_ptr error, int rank);

  const std::shared_ptr<ThreadRun> run;
  std::vector<std::shared_ptr<ThreadWorld>> worlds;

  base::Mutex mutex;
  base::Condition started;
  base::Condition finished;
  const std::function<void(World&)>* body TESSERA_GUARDED_BY(mutex) = nullptr;
  std::uint64_t round TESSERA_GUARDED_BY(mutex) = 0;
  int running TESSERA_GUARDED_BY(mutex) = 0;
  bool stopping TESSERA_GUARDED_BY(mutex) = false;
  /// The error that run() throws: the first one that does not repeat why its rank was aborted, else
  /// the first one. A rank that was aborted may end before the one that aborted it.
  std::exception_ptr cause TESSERA_GUARDED_BY(mutex);
  bool cause_repeats TESSERA_GUARDED_BY(mutex) = false;
  std::vector<std::thread> threads;
};

void ThreadRanks::Impl::fail(std::exception_ptr error, int rank) {
  std::string why = "an exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    why = one_line(known.what());
  } catch (...) {
  }
  const bool repeats = worlds[static_cast<std::size_t>(rank)]->repeats_abort(why);
  {
    const base::Lock lock(mutex);
    if (!cause || (cause_repeats && !repeats)) {
      cause = std::move(error);
      cause_repeats = repeats;
    }
  }
  run->abort_all(of_rank(rank, why));
  run->rendezvous.abandon();
}

void ThreadRanks::Impl::attempt(World& world, const std::function<void(World&)>& what) {
  try {
    what(world);
  } catch (...) {
    fail(std::current_exception(), world.rank());
  }
}

void ThreadRanks::Impl::serve(int rank) {
  base::set_threads(std::max(1, base::usable_cores() / run->size));
  ThreadWorld& world = *worlds[static_cast<std::size_t>(rank)];
  world.attach_thread();
  std::uint64_t served = 0;
  base::Lock lock(mutex);
  for (;;) {
    started.wait(lock, [&]() TESSERA_REQUIRES(mutex) { return stopping || round != served; });
    if (stopping) {
      lock.unlock();
      return world.end_connections();
    }
    served = round;
    const std::function<void(World&)>& what = *body;
    lock.unlock();
    attempt(world, what);
    lock.lock();
    if (--running == 0) finished.notify_all();
  }
}

ThreadRanks::ThreadRanks(int ranks, ThreadBackend backend, const WorldOptions& options) {
  TESSERA_CHECK(ranks >= 1, ErrorKind::kUsage, "thread ranks: found ", ranks,
                ", expected at least 1");
  impl_ = std::make_unique<Impl>(std::make_shared<ThreadRun>(ranks, backend, options));
  for (int rank = 0; rank < ranks; ++rank) {
    impl_->worlds.push_back(std::make_shared<ThreadWorld>(impl_->run, rank));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    impl_->threads.emplace_back([impl = impl_.get(), rank] { impl->serve(rank); });
  }
}

ThreadRanks::Impl::~Impl() {
  {
    const base::Lock lock(mutex);
    stopping = true;
  }
  started.notify_all();
  for (std::thread& thread : threads) thread.join();
}

ThreadRanks::~ThreadRanks() = default;

int ThreadRanks::size() const { return impl_->run->size; }

void ThreadRanks::run(const std::function<void(World&)>& body) {
  std::exception_ptr error;
  {
    base::Lock lock(impl_->mutex);
    impl_->body = &body;
    impl_->running = impl_->run->size;
    ++impl_->round;
    impl_->started.notify_all();
    impl_->finished.wait(lock,
                         [&]() TESSERA_REQUIRES(impl_->mutex) { return impl_->running == 0; });
    error = std::exchange(impl_->cause, nullptr);
  }
  const bool aborted = std::any_of(impl_->worlds.begin(), impl_->worlds.end(),
                                   [](const auto& world) { return world->aborted(); });
  if (aborted) {
    // A queue's thread that is still inside a collective would join that of the next generation.
    for (const auto& world : impl_->worlds) world->queue().drain();
    impl_->run->rendezvous.reset();
    const int epoch = impl_->run->begin_epoch();
    for (const auto& world : impl_->worlds) world->repair(epoch);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace tessera::comm

namespace tessera {

void launch_threads(int ranks, ThreadBackend backend, const std::function<void(World&)>& body,
                    const WorldOptions& options) {
  comm::ThreadRanks(ranks, backend, options).run(body);
}

}  // namespace tessera
