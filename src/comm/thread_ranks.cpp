#include "comm/thread_ranks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/queue.h"
#include "comm/thread_world.h"
#include "launch/failure_record.h"
#include "tessera/error.h"

namespace tessera::comm {

struct ThreadRanks::Impl {
  explicit Impl(std::shared_ptr<ThreadRun> what) : run(std::move(what)) {}

  void serve(int rank);
  void attempt(World& world, const std::function<void(World&)>& body);
  void fail(std::exception_ptr error, int rank);

  const std::shared_ptr<ThreadRun> run;
  std::vector<std::shared_ptr<ThreadWorld>> worlds;

  std::mutex mutex;
  std::condition_variable started;
  std::condition_variable finished;
  const std::function<void(World&)>* body = nullptr;
  std::uint64_t round = 0;
  int running = 0;
  bool stopping = false;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
};

void ThreadRanks::Impl::fail(std::exception_ptr error, int rank) {
  std::string why = "an exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    why = known.what();
  } catch (...) {
  }
  {
    const std::lock_guard lock(mutex);
    if (!first_error) first_error = std::move(error);
  }
  run->poison_all(of_rank(rank, why));
  run->hub.abandon();
}

void ThreadRanks::Impl::attempt(World& world, const std::function<void(World&)>& what) {
  try {
    what(world);
  } catch (...) {
    fail(std::current_exception(), world.rank());
  }
}

void ThreadRanks::Impl::serve(int rank) {
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  at::set_num_threads(std::max(1, cores / run->size));
  World& world = *worlds[static_cast<std::size_t>(rank)];
  std::uint64_t served = 0;
  std::unique_lock lock(mutex);
  for (;;) {
    started.wait(lock, [&] { return stopping || round != served; });
    if (stopping) return;
    served = round;
    lock.unlock();
    attempt(world, *body);
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
    impl_->threads.emplace_back([this, rank] { impl_->serve(rank); });
  }
}

ThreadRanks::~ThreadRanks() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->started.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

int ThreadRanks::size() const { return impl_->run->size; }

void ThreadRanks::bend_for_tests(Hub::Bend bend) {
  impl_->run->hub.bend_for_tests(std::move(bend));
}

void ThreadRanks::run(const std::function<void(World&)>& body) {
  std::exception_ptr error;
  {
    std::unique_lock lock(impl_->mutex);
    impl_->body = &body;
    impl_->running = impl_->run->size;
    ++impl_->round;
    impl_->started.notify_all();
    impl_->finished.wait(lock, [&] { return impl_->running == 0; });
    error = std::exchange(impl_->first_error, nullptr);
  }
  const bool poisoned = std::any_of(impl_->worlds.begin(), impl_->worlds.end(),
                                    [](const auto& world) { return world->poisoned(); });
  if (poisoned) {
    // A queue's thread that is still inside a collective would join the next generation's.
    for (const auto& world : impl_->worlds) world->queue().drain();
    impl_->run->hub.reset();
    const int epoch = ++impl_->run->epoch;
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
