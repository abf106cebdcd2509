#include "comm/failure_watch.h"

#include "tessera/error.h"

namespace tessera::comm {

namespace store_key {
std::string poison(int epoch) { return concat("poison/", epoch); }
std::string pulse(int rank) { return concat("pulse/", rank); }
}  // namespace store_key

namespace {

std::string issued_key(int epoch, int rank) { return concat("issued/", epoch, "/", rank); }

}  // namespace

std::vector<int> silent_ranks(Store& store, const std::vector<int>& ranks,
                              std::chrono::milliseconds time) {
  const auto beats = [&] {
    std::vector<std::optional<std::string>> all;
    for (const int rank : ranks) all.push_back(store.find(store_key::pulse(rank)));
    return all;
  };
  const auto before = beats();
  std::this_thread::sleep_for(time);
  const auto after = beats();
  std::vector<int> silent;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (before[i] == after[i]) silent.push_back(ranks[i]);
  }
  return silent;
}

FailureWatch::FailureWatch(std::shared_ptr<Store> own_connection, std::shared_ptr<WaitBoard> board,
                           WatchOptions options, Actions actions)
    : store_(std::move(own_connection)),
      board_(std::move(board)),
      options_(options),
      actions_(std::move(actions)),
      thread_([this] { run(); }) {}

FailureWatch::~FailureWatch() { stop(); }

void FailureWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void FailureWatch::set_epoch(int epoch) {
  epoch_ = epoch;
  over_ = false;
}

void FailureWatch::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    try {
      if (!over_) look();
    } catch (const std::exception& error) {
      over_ = true;
      lock.lock();
      if (stopping_) return;
      lock.unlock();
      actions_.lost(concat("the store is gone, rank 0 or the launcher has left: ", error.what()));
    }
    lock.lock();
    wake_.wait_for(lock, options_.poll, [&] { return stopping_; });
  }
}

void FailureWatch::look() {
  if (const auto why = store_->find(store_key::kFailure)) {
    over_ = true;
    actions_.failed(*why);
    return;
  }
  const int epoch = epoch_;
  if (poisoned_epoch_ != epoch) {
    if (const auto why = store_->find(store_key::poison(epoch))) {
      poisoned_epoch_ = epoch;
      actions_.poisoned(*why, epoch);
      return;
    }
  }
  store_->set(store_key::pulse(options_.rank), std::to_string(++beats_));
  const auto waited = board_->longest_wait();
  if (!waited || *waited < options_.blocked_after) {
    pulses_.clear();
    return;
  }
  publish(epoch);
  compare_with_peers(epoch);
  listen_for_peers();
}

void FailureWatch::publish(int epoch) {
  std::string lines = board_->lines();
  if (lines == published_ && epoch == published_epoch_) return;
  store_->set(issued_key(epoch, options_.rank), lines);
  published_epoch_ = epoch;
  published_ = std::move(lines);
}

void FailureWatch::compare_with_peers(int epoch) {
  for (const int peer : board_->peers()) {
    if (peer == options_.rank || over_) continue;
    const auto theirs = store_->find(issued_key(epoch, peer));
    if (!theirs) continue;
    if (const auto why = find_disagreement(options_.rank, published_, peer, *theirs)) {
      over_ = true;
      actions_.disagree(*why);
    }
  }
}

void FailureWatch::listen_for_peers() {
  const auto now = std::chrono::steady_clock::now();
  for (const int peer : board_->peers()) {
    if (peer == options_.rank || over_) continue;
    const std::string beat = store_->find(store_key::pulse(peer)).value_or("");
    auto [pulse, first] = pulses_.try_emplace(peer, Pulse{beat, now});
    if (pulse->second.beat != beat) pulse->second = {beat, now};
    if (now - pulse->second.since < options_.silent_after) continue;
    over_ = true;
    actions_.lost(concat("rank ", peer, " has given no sign of life for ",
                         in_seconds(options_.silent_after)));
  }
}

}  // namespace tessera::comm
