#include "comm/thread_world.h"

#include <numeric>

#include "comm/backends/gloo/gloo.h"
#include "comm/queue.h"
#include "comm/world_state.h"
#include "launch/failure_record.h"
#include "tessera/error.h"

namespace tessera::comm {

void ThreadRun::poison_all(const std::string& why) {
  const std::lock_guard lock(mutex);
  for (ThreadWorld* world : worlds) world->poison_here(why);
  hub.wake_all();
  for (ThreadWorld* world : worlds) world->wake();
}

ThreadWorld::ThreadWorld(std::shared_ptr<ThreadRun> run, int rank)
    : World(rank, run->size, rank), run_(std::move(run)) {
  state_->store = run_->store;
  state_->init_timeout = run_->options.init_timeout;
  const bool over_gloo = run_->backend == ThreadBackend::kGloo && size_ > 1;
  connections_ = over_gloo ? open_gloo(LaunchEnvironment{}) : open_in_process(run_->hub);
  if (over_gloo) {
    WatchOptions watch = watch_options(rank, run_->size);
    watch.blocked_after = run_->options.blocked_after;
    watch.poll = std::min(watch.poll, watch.blocked_after / 4 + std::chrono::milliseconds(1));
    state_->poison->patience.expect_words_within(WatchTimes{watch.poll}.words());
    std::vector<int> everyone(static_cast<std::size_t>(size_));
    std::iota(everyone.begin(), everyone.end(), 0);
    state_->board->watch(std::move(everyone));
    FailureWatch::Actions actions;
    actions.failed = actions.lost =
        actions.disagree = [this](const std::string& why) { run_->poison_all(why); };
    actions.poisoned = [](const std::string&, int) {};  // poison_all() has done it
    watch_ = std::make_unique<FailureWatch>(run_->store, state_->board, watch, std::move(actions));
  }
  const std::lock_guard lock(run_->mutex);
  run_->worlds.push_back(this);
}

ThreadWorld::~ThreadWorld() {
  if (watch_) watch_->stop();
  {
    const std::lock_guard lock(run_->mutex);
    std::erase(run_->worlds, this);
  }
  stop_queue();
}

std::string ThreadWorld::backend() const {
  if (size_ == 1) return "none";
  return run_->backend == ThreadBackend::kGloo ? "gloo" : "in-process";
}

void ThreadWorld::poison(const std::string& why) { run_->poison_all(of_rank(rank_, why)); }

void ThreadWorld::poison_here(const std::string& why) {
  state_->poison->mark(why);
  queue_->poison(why);
}

void ThreadWorld::wake() { state_->board->abort_all(); }

void ThreadWorld::recover() {
  // Whoever still waits for this rank is to leave, too.
  if (!poisoned()) poison("recovers from an error of its own");
  queue_->drain();        // its thread may still be inside a collective
  run_->hub.meet(size_);  // from here on nobody is in one
  if (rank_ == 0) {
    ++run_->epoch;
    run_->hub.reset();
  }
  run_->hub.meet(size_);
  repair(run_->epoch);
  run_->hub.meet(size_);  // a rank that goes on meets no half-repaired one
}

void ThreadWorld::repair(int epoch) {
  queue_->recover();
  connections_->reset(epoch);
  if (watch_) watch_->set_epoch(epoch);
  ++recoveries_;
  state_->poison->clear();
}

std::shared_ptr<Group> ThreadWorld::make_group(const std::vector<int>& ranks,
                                               const std::string& name) {
  return connections_->make_group(
      {name, ranks, rank_, run_->options, run_->store, state_->poison, state_->board});
}

}  // namespace tessera::comm
