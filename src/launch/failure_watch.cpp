#include "launch/failure_watch.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "base/interrupt.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kDisagreement = "ranks disagree: ";

Abort decode_abort(const std::string& written) {
  const bool is_disagreement = written.starts_with(kDisagreement);
  return {is_disagreement ? written.substr(kDisagreement.size()) : written, is_disagreement};
}

}  // namespace

std::string encode(const Abort& abort) {
  return concat(abort.is_disagreement ? kDisagreement : "", abort.why);
}

WatchOptions watch_options(int rank, int ranks) {
  WatchOptions options;
  options.rank = rank;
  options.poll = watch_poll(ranks);
  options.silent_after = WatchTimes{options.poll}.silent_after();
  return options;
}

std::vector<int> neighbours(std::vector<int> ranks, int self) {
  constexpr std::size_t kAskedFor = 8;
  std::ranges::rotate(ranks, std::ranges::upper_bound(ranks, self));
  if (ranks.size() > kAskedFor) ranks.erase(ranks.begin(), ranks.end() - kAskedFor);
  std::ranges::sort(ranks);
  return ranks;
}

std::vector<int> silent_ranks(Store& store, const std::vector<int>& ranks,
                              std::chrono::milliseconds time) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(store_key::pulse(rank));
  const auto before = store.find_all(keys);
  std::this_thread::sleep_for(time);
  const auto after = store.find_all(keys);
  std::vector<int> silent;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (before[i] == after[i]) silent.push_back(ranks[i]);
  }
  return silent;
}

class FailureWatch::Keys final : public WatchedStore {
 public:
  explicit Keys(Store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  /// Keys stay once they exist, so this is asked once.
  std::vector<std::optional<std::string>> find(const std::vector<std::string>& keys) override {
    const bool known =
        std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return seen_.contains(key); });
    if (!known) {
      auto values = store_.find_all(keys);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        if (values[i]) seen_.insert(keys[i]);
      }
      return values;
    }
    std::vector<std::optional<std::string>> values;
    for (auto& value : store_.get_all(keys)) values.emplace_back(std::move(value));
    return values;
  }

 private:
  Store& store_;
  std::set<std::string> seen_;
};

FailureWatch::FailureWatch(std::shared_ptr<Store> own_connection, std::shared_ptr<WaitBoard> board,
                           WatchOptions options, Actions actions)
    : store_(std::move(own_connection)),
      board_(std::move(board)),
      options_(options),
      actions_(std::move(actions)),
      keys_(std::make_unique<Keys>(*store_)),
      peers_(*keys_, {options.rank, options.blocked_after, options.silent_after}) {
  thread_ = std::thread([this] { each_poll(&FailureWatch::look_or_end); });
  try {
    heart_ = std::thread([this] { each_poll(&FailureWatch::beat); });
  } catch (...) {
    stop();  // destroying a thread that was not joined would end the process
    throw;
  }
}

FailureWatch::~FailureWatch() { stop(); }

void FailureWatch::stop() {
  {
    const base::Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread* thread : {&thread_, &heart_}) {
    if (thread->joinable()) thread->join();
  }
}

void FailureWatch::set_epoch(int epoch) {
  epoch_ = epoch;
  board_->set_epoch(epoch);
  over_ = false;
}

void FailureWatch::each_poll(void (FailureWatch::*act)()) {
  const base::NoInterrupts of_the_library;
  base::Lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    (this->*act)();
    lock.lock();
    wake_.wait_for(lock, options_.poll, [&]() TESSERA_REQUIRES(mutex_) { return stopping_; });
  }
}

void FailureWatch::look_or_end() {
  if (over_) return look_for_end_of_grace();
  const WaitBoard::Look looking(*board_);
  try {
    look();
  } catch (const std::exception& error) {
    over_ = true;
    {
      const base::Lock lock(mutex_);
      if (stopping_) return;
    }
    const auto waits = board_->standing().wait;
    actions_.lost(concat("the store is gone, rank 0 or the launcher has left: ", error.what(),
                         waits ? concat("; this rank waits for: ", waits->text) : ""));
    begin_grace();
  }
}

void FailureWatch::begin_grace() {
  if (options_.grace) grace_since_ = std::chrono::steady_clock::now();
}

void FailureWatch::look_for_end_of_grace() {
  if (!grace_since_) return;
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - *grace_since_);
  if (time < *options_.grace) return;
  grace_since_.reset();
  bool stands = false;
  if (!has_thrown(time, stands)) actions_.grace_is_over();
}

bool FailureWatch::has_thrown(std::chrono::milliseconds time, bool& stands) const {
  // The wait belongs to an earlier collective, which has not ended. A wait in the store ends by
  // itself, or belongs to a recovery.
  const Standing standing = board_->standing();
  stands = standing.wait && standing.waited >= time;
  return actions_.acknowledged() && !stands;
}

void FailureWatch::look() {
  if (const auto why = store_->find(store_key::kFailure)) {
    over_ = true;
    actions_.failed(*why);
    return begin_grace();
  }
  const int epoch = epoch_;
  if (aborted_epoch_ != epoch && look_for_abort(epoch)) return;
  look_for_acknowledgement(epoch);
  if (const auto why = board_->stalled_device()) {
    over_ = true;
    actions_.lost(*why);
    return begin_grace();
  }
  look_at_peers(epoch);
  ++looks_;
}

bool FailureWatch::look_for_abort(int epoch) {
  const auto written = store_->find(store_key::abort(epoch));
  if (!written) return false;
  aborted_epoch_ = epoch;
  const Abort abort = decode_abort(*written);
  if (abort.is_disagreement) expect_acknowledgement(abort.why, epoch);
  actions_.aborted(abort, epoch);
  return true;
}

/// Called before the waits end, since the program may be in another wait afterwards.
void FailureWatch::expect_acknowledgement(const std::string& why, int epoch) {
  if (unacknowledged_ && unacknowledged_->epoch == epoch) return;
  unacknowledged_ = {why, epoch, std::chrono::steady_clock::now()};
}

void FailureWatch::look_for_acknowledgement(int epoch) {
  if (!unacknowledged_) return;
  if (unacknowledged_->epoch != epoch) return unacknowledged_.reset();
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - unacknowledged_->since);
  if (time < options_.acknowledged_within) return;
  bool stands = false;
  if (has_thrown(time, stands)) return unacknowledged_.reset();
  const std::string why = std::exchange(unacknowledged_, std::nullopt)->why;
  actions_.unacknowledged(
      concat(why, "; this rank ",
             stands ? "did not come out of its call of the library"
                    : "made no call of the library, from which this could be thrown,",
             " within ", in_seconds(options_.acknowledged_within)),
      epoch);
}

void FailureWatch::look_at_peers(int epoch) {
  const Standing standing = board_->standing();
  const auto found = peers_.look(std::chrono::steady_clock::now(), epoch, standing,
                                 [&] { return board_->lines(); });
  if (standing.wait) board_->set_cause(epoch, *standing.wait, peers_.cause());
  for (const int rank : standing.doubtful) board_->heard(rank, peers_.last_beat(rank));
  if (!found) return;
  if (found->what == PeerWatch::Finding::What::kLost) {
    over_ = true;
    actions_.lost(found->why);
    return begin_grace();
  }
  if (epoch != epoch_ || std::exchange(disagreed_epoch_, epoch) == epoch) return;
  expect_acknowledgement(found->why, epoch);
  actions_.disagree(found->why, epoch);
}

void FailureWatch::beat() {
  const Standing standing = board_->standing();
  Pulse pulse{++beats_, epoch_,          standing.waits, standing.wait,
              -1,       standing.issued, standing.leaves};
  if (pulse.wait) {
    pulse.cause = board_->cause_of(pulse.wait->group, pulse.wait->sequence).value_or(-1);
  }
  try {
    store_->set(store_key::pulse(options_.rank), encode(pulse));
  } catch (const std::exception&) {
    // The watch finds and reports it.
  }
}

}  // namespace tessera::comm
