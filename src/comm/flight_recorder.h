// FlightRecorder: what one group has issued lately on this rank.
//
// Written at every collective (cheap: no text is made). Its lines and hashes go to the failure
// watch, which compares ranks (launch/wait_board.h), and name the collective in every error of a
// wait. Next: batch.h, what an entry is.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/mutex.h"
#include "comm/batch.h"
#include "launch/wait_board.h"

namespace tessera::comm {

/// The last entries of one group on one rank. Threads: any.
class FlightRecorder final : public Recorded {
 public:
  explicit FlightRecorder(std::string group);
  std::uint64_t record(const Batch& batch, std::uint64_t sequence);  ///< returns the fingerprint
  void clear();
  std::string lines() const override;
  IssuedHashes issued() const override;
  /// That the entry `sequence` waits for `peer`, a world rank.
  PeerWait wait_for(std::uint64_t sequence, int peer) const;
  std::uint64_t group_hash() const { return group_hash_; }

 private:
  struct Kept {
    Entry entry;
    std::uint64_t hash_so_far = 0;  ///< of all entries up to this one
  };

  const std::string group_;
  const std::uint64_t group_hash_;
  mutable base::Mutex mutex_;
  std::array<Kept, 64> ring_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t count_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::comm
