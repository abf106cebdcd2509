#include "launch/wait_board.h"

#include <algorithm>
#include <utility>

#include "base/interrupt.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

class StoreRendezvous : public Blocked {
 public:
  void abort() override {}
};

}  // namespace

void meet_on_board(WaitBoard& board, const std::function<void()>& meet) {
  StoreRendezvous rendezvous;
  const OnBoard waiting(board, rendezvous);
  meet();
}

void WaitBoard::enter(Blocked& wait) {
  const base::Lock lock(mutex_);
  waits_.push_back({&wait, std::chrono::steady_clock::now()});
}

void WaitBoard::leave(Blocked& wait) {
  const base::Lock lock(mutex_);
  std::erase_if(waits_, [&](const Item& item) { return item.wait == &wait; });
}

void WaitBoard::abort_all() {
  const base::Lock lock(mutex_);
  for (const Item& item : waits_) item.wait->abort();
}

void WaitBoard::add(std::shared_ptr<Recorded> log) {
  const base::Lock lock(mutex_);
  logs_.push_back(std::move(log));
}

void WaitBoard::remove(const Recorded& log) {
  const base::Lock lock(mutex_);
  std::erase_if(logs_, [&](const auto& one) { return one.get() == &log; });
}

int WaitBoard::groups() const {
  const base::Lock lock(mutex_);
  return static_cast<int>(logs_.size());
}

void WaitBoard::watch(std::vector<int> ranks) {
  const base::Lock lock(mutex_);
  peers_ = std::move(ranks);
}

void WaitBoard::set_store_rank(std::optional<int> rank) {
  const base::Lock lock(mutex_);
  store_rank_ = rank;
}

std::optional<int> WaitBoard::store_rank() const {
  const base::Lock lock(mutex_);
  return store_rank_;
}

std::string WaitBoard::lines() const {
  const base::Lock lock(mutex_);
  std::string text;
  for (const auto& log : logs_) text += log->lines();
  return text;
}

Standing WaitBoard::standing() const {
  const base::Lock lock(mutex_);
  Standing standing;
  standing.peers = peers_;
  standing.leaves = leaves_;
  for (const auto& [doubt, doubted] : doubts_) standing.doubtful.push_back(doubted.rank);
  standing.waits = static_cast<int>(waits_.size());
  if (waits_.empty()) return standing;
  const auto now = std::chrono::steady_clock::now();
  // Waits are in the order in which they began.
  standing.waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - waits_[0].since);
  for (const Item& item : waits_) {
    standing.wait = item.wait->waits_for();
    if (standing.wait) break;
  }
  for (const auto& log : logs_) {
    standing.issued.push_back(log->issued());
    if (standing.issued.back().count == 0) standing.issued.pop_back();
  }
  return standing;
}

WaitBoard::Frozen WaitBoard::now() const {
  Frozen now;
  now.threads_waiting = static_cast<int>(waits_.size());
  for (const Item& item : waits_) {
    if (auto wait = item.wait->waits_for()) now.waits.push_back({*std::move(wait), item.since});
  }
  for (const auto& log : logs_) {
    if (auto lane = log->lane()) now.lanes.push_back(*std::move(lane));
  }
  return now;
}

void WaitBoard::freeze() noexcept {
  // A board that was kept for a wait whose error did not end the run is of no use to a later one.
  constexpr std::chrono::seconds kOfAnotherFailure{20};
  try {
    const base::Lock lock(mutex_);
    const auto time = std::chrono::steady_clock::now();
    if (frozen_ && time - frozen_since_ < kOfAnotherFailure) return;
    frozen_ = now();
    frozen_since_ = time;
  } catch (const std::exception&) {
    return;  // without memory there is no report either
  }
}

RankBoard WaitBoard::board(int rank, std::size_t most_items) const {
  Frozen frozen;
  {
    const base::Lock lock(mutex_);
    frozen = frozen_ ? *frozen_ : now();
  }
  return make_board(rank, frozen.threads_waiting, frozen.waits, std::move(frozen.lanes), order_,
                    most_items);
}

void WaitBoard::set_leaving() {
  const base::Lock lock(mutex_);
  leaves_ = true;
}

void WaitBoard::watch_device(std::weak_ptr<DeviceWatch> device) {
  const base::Lock lock(mutex_);
  device_ = std::move(device);
}

std::optional<std::string> WaitBoard::stalled_device() const {
  std::shared_ptr<DeviceWatch> device;
  {
    const base::Lock lock(mutex_);
    device = device_.lock();
  }
  // Called without the board's lock: it queries the device, and heartbeats must not wait for that.
  return device ? device->stalled() : std::nullopt;
}

WaitBoard::Look::Look(WaitBoard& board) : board_(board) {
  const base::Lock lock(board_.mutex_);
  board_.looks_since_ = std::chrono::steady_clock::now();
}

WaitBoard::Look::~Look() {
  const base::Lock lock(board_.mutex_);
  board_.looks_since_.reset();
}

WaitBoard::Doubt::Doubt(WaitBoard& board, int rank) : board_(board) {
  const base::Lock lock(board_.mutex_);
  board_.doubts_[this].rank = rank;
}

WaitBoard::Doubt::~Doubt() {
  const base::Lock lock(board_.mutex_);
  board_.doubts_.erase(this);
}

std::optional<std::chrono::steady_clock::time_point> WaitBoard::Doubt::last_beat() const {
  const base::Lock lock(board_.mutex_);
  return board_.doubts_.at(this).last_beat;
}

void WaitBoard::heard(int rank, std::optional<std::chrono::steady_clock::time_point> beat) {
  const base::Lock lock(mutex_);
  for (auto& [doubt, doubted] : doubts_) {
    if (doubted.rank != rank) continue;
    if (!doubted.heard_first) doubted.heard_first = std::chrono::steady_clock::now();
    if (beat && *beat > *doubted.heard_first) doubted.last_beat = beat;
  }
}

bool WaitBoard::looks_since_before(std::chrono::steady_clock::time_point time) const {
  const base::Lock lock(mutex_);
  return looks_since_ && *looks_since_ < time;
}

void WaitBoard::set_epoch(int epoch) {
  const base::Lock lock(mutex_);
  epoch_ = epoch;
  cause_ = -1;
  frozen_.reset();
  order_.clear();
}

void WaitBoard::set_cause(int epoch, const PeerWait& wait, int rank) {
  const base::Lock lock(mutex_);
  if (epoch != epoch_) return;  // called by a look that began before the recovery
  caused_wait_ = wait;
  cause_ = rank;
}

std::optional<int> WaitBoard::cause_of(std::uint64_t group, std::uint64_t sequence) const {
  const base::Lock lock(mutex_);
  if (cause_ < 0 || caused_wait_.group != group || caused_wait_.sequence != sequence) {
    return std::nullopt;
  }
  return cause_;
}

StartUpLog::StartUpLog(std::shared_ptr<const WaitBoard> board, std::chrono::milliseconds every,
                       Works works, std::function<void(const std::string&)> say)
    : board_(std::move(board)),
      every_(every),
      works_(std::move(works)),
      say_(std::move(say)),
      thread_([this] { run(); }) {}

StartUpLog::~StartUpLog() {
  {
    const base::Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void StartUpLog::run() {
  const base::NoInterrupts of_the_library;
  base::Lock lock(mutex_);
  while (!wake_.wait_for(lock, every_, [&]() TESSERA_REQUIRES(mutex_) { return stopping_; })) {
    lock.unlock();
    const auto waited = board_->standing().waited;
    if (waited >= every_) {
      const std::string works = works_();
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(waited).count();
      if (!works.empty()) say_(concat("start-up: waiting for ", seconds, " s: ", works));
    }
    lock.lock();
  }
}

}  // namespace tessera::comm
