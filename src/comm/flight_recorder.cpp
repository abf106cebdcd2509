#include "comm/flight_recorder.h"

#include <algorithm>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::comm {

FlightRecorder::FlightRecorder(std::string group)
    : group_(std::move(group)), group_hash_(hash_bytes(group_)) {}

std::uint64_t FlightRecorder::record(const Batch& batch, std::uint64_t sequence) {
  const base::Lock lock(mutex_);
  const std::uint64_t before = count_ == 0 ? 0 : ring_[(count_ - 1) % ring_.size()].hash_so_far;
  Kept& kept = ring_[count_++ % ring_.size()];
  describe(batch, sequence, kept.entry);
  kept.hash_so_far = Hasher().add(before).add(kept.entry.fingerprint).digest();
  return kept.entry.fingerprint;
}

void FlightRecorder::clear() {
  const base::Lock lock(mutex_);
  count_ = 0;
}

std::string FlightRecorder::lines() const {
  const base::Lock lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  std::string text;
  for (std::uint64_t i = count_ - kept; i < count_; ++i) {
    const Entry& entry = ring_[i % ring_.size()].entry;
    text +=
        concat(group_, "\t", entry.sequence, "\t", entry.fingerprint, "\t", to_string(entry), "\n");
  }
  return text;
}

IssuedHashes FlightRecorder::issued() const {
  const base::Lock lock(mutex_);
  IssuedHashes issued{group_hash_, count_, {}};
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  for (std::uint64_t back = 1; back <= kept; ++back) {
    issued.latest.push_back(ring_[(count_ - back) % ring_.size()].hash_so_far);
  }
  return issued;
}

PeerWait FlightRecorder::wait_for(std::uint64_t sequence, int peer) const {
  const base::Lock lock(mutex_);
  const Entry& entry = ring_[sequence % ring_.size()].entry;
  const bool kept = sequence < count_ && entry.sequence == sequence;
  return {group_hash_, sequence, peer,
          concat(kept ? to_string(entry) : concat("#", sequence), " on group ", group_)};
}

}  // namespace tessera::comm
