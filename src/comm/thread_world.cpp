#include "comm/thread_world.h"

#include <algorithm>
#include <numeric>

#include "base/environment.h"
#include "comm/point_to_point.h"
#include "comm/queue.h"
#include "comm/world_state.h"
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
  if (run_->backend == ThreadBackend::kGloo && size_ > 1) {
    device_ = std::make_shared<GlooDevice>(LaunchEnvironment{});
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

void ThreadWorld::poison(const std::string& why) {
  run_->poison_all(concat("rank ", rank_, ": ", why));
}

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
  for (const auto& group : gloo_groups_) group->reset(epoch);
  if (watch_) watch_->set_epoch(epoch);
  ++recoveries_;
  state_->poison->clear();
}

std::shared_ptr<Group> ThreadWorld::make_group(const std::vector<int>& ranks,
                                               const std::string& name) {
  const int self = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  if (!device_) return run_->hub.make_group(name, ranks, self, state_->poison);
  ChannelOptions channel;
  channel.name = name;
  channel.members = ranks;
  channel.self = self;
  channel.timeout = run_->options.timeout;
  channel.compare_entries =
      run_->options.compare_entries || base::environment_switch("TESSERA_COMPARE_ENTRIES");
  channel.poison = state_->poison;
  channel.board = state_->board;
  const bool when_used = connects_when_used(name);
  const auto key_of = [name](int epoch) { return concat("group ", name, " (", epoch, ")"); };
  channel.open = [run = run_.get(), device = device_, poison = state_->poison, rank = rank_, ranks,
                  when_used, key_of, self](int epoch, const std::function<void(int)>& waits_for)
      -> c10::intrusive_ptr<c10d::Backend> {
    const std::string key = key_of(epoch);
    run->store->meet(key, rank, ranks, run->options.init_timeout, *poison);
    if (when_used) return {};
    return connect_all(*run->store, *device,
                       {key, self, static_cast<int>(ranks.size()), run->options.init_timeout},
                       poison, waits_for);
  };
  if (when_used) {
    channel.open_pair =
        pair_opener(run_->store, device_, run_->options.timeout, state_->poison, self, key_of);
  }
  auto group = std::make_shared<PointToPointGroup>(std::move(channel));
  gloo_groups_.push_back(group);
  return group;
}

}  // namespace tessera::comm
