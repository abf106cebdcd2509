#include "comm/wait_board.h"

#include <algorithm>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::comm {

IssueLog::IssueLog(std::string group) : group_(std::move(group)), group_hash_(hash_bytes(group_)) {}

std::uint64_t IssueLog::record(const Batch& batch, std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = count_ == 0 ? 0 : ring_[(count_ - 1) % ring_.size()].hash_so_far;
  Kept& kept = ring_[count_++ % ring_.size()];
  describe(batch, sequence, kept.entry);
  kept.hash_so_far = Hasher().add(before).add(kept.entry.fingerprint).digest();
  return kept.entry.fingerprint;
}

void IssueLog::clear() {
  const std::lock_guard lock(mutex_);
  count_ = 0;
}

std::string IssueLog::lines() const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  std::string text;
  for (std::uint64_t i = count_ - kept; i < count_; ++i) {
    const Entry& entry = ring_[i % ring_.size()].entry;
    text +=
        concat(group_, "\t", entry.sequence, "\t", entry.fingerprint, "\t", to_string(entry), "\n");
  }
  return text;
}

IssuedHashes IssueLog::issued() const {
  const std::lock_guard lock(mutex_);
  IssuedHashes issued{group_hash_, count_, {}};
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  for (std::uint64_t back = 1; back <= kept; ++back) {
    issued.latest.push_back(ring_[(count_ - back) % ring_.size()].hash_so_far);
  }
  return issued;
}

PeerWait IssueLog::wait_for(std::uint64_t sequence, int peer) const {
  const std::lock_guard lock(mutex_);
  const Entry& entry = ring_[sequence % ring_.size()].entry;
  const bool kept = sequence < count_ && entry.sequence == sequence;
  return {group_hash_, sequence, peer,
          concat(kept ? to_string(entry) : concat("#", sequence), " on group ", group_)};
}

void WaitBoard::enter(Blocked& wait) {
  const std::lock_guard lock(mutex_);
  waits_.push_back({&wait, std::chrono::steady_clock::now()});
}

void WaitBoard::leave(Blocked& wait) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Item& item) { return item.wait == &wait; });
}

void WaitBoard::abort_all() {
  const std::lock_guard lock(mutex_);
  for (const Item& item : waits_) item.wait->abort();
}

void WaitBoard::add(std::shared_ptr<IssueLog> log) {
  const std::lock_guard lock(mutex_);
  logs_.push_back(std::move(log));
}

void WaitBoard::watch(std::vector<int> ranks) {
  const std::lock_guard lock(mutex_);
  peers_ = std::move(ranks);
}

std::string WaitBoard::lines() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& log : logs_) text += log->lines();
  return text;
}

Standing WaitBoard::standing() const {
  const std::lock_guard lock(mutex_);
  Standing standing;
  standing.peers = peers_;
  standing.waits = static_cast<int>(waits_.size());
  if (waits_.empty()) return standing;
  const auto now = std::chrono::steady_clock::now();
  // In the order in which they began.
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

WaitBoard::Look::Look(WaitBoard& board) : board_(board) {
  const std::lock_guard lock(board_.mutex_);
  board_.looks_since_ = std::chrono::steady_clock::now();
}

WaitBoard::Look::~Look() {
  const std::lock_guard lock(board_.mutex_);
  board_.looks_since_.reset();
}

bool WaitBoard::looks_since_before(std::chrono::steady_clock::time_point time) const {
  const std::lock_guard lock(mutex_);
  return looks_since_ && *looks_since_ < time;
}

void WaitBoard::set_epoch(int epoch) {
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
  cause_ = -1;
}

void WaitBoard::set_cause(int epoch, const PeerWait& wait, int rank) {
  const std::lock_guard lock(mutex_);
  if (epoch != epoch_) return;  // by a look that began before the recovery
  caused_wait_ = wait;
  cause_ = rank;
}

std::optional<int> WaitBoard::cause_of(std::uint64_t group, std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  if (cause_ < 0 || caused_wait_.group != group || caused_wait_.sequence != sequence) {
    return std::nullopt;
  }
  return cause_;
}

}  // namespace tessera::comm
