// Batches for all backends: their text, their fingerprint, their check, the bytes that a rank sends
// for one, the record of the latest ones, and the case of one rank.
//
// The fingerprint covers everything that must agree over ranks (kinds, unit, micro-batch, bytes,
// dtypes); an error prints the text where it does not. Each op (ops/operation.h) computes what it
// sends between pairs of ranks: Gloo's transport compares what it has posted with sent_bytes()
// (backends/gloo/exchange.h); traces and tests call the same function. For ranks of one process it
// is what the same ranks would send over Gloo. NCCL sends in its own ways.
//
// FlightRecorder holds the latest collectives that one group has issued on this rank. It is written
// at every collective (cheap: no text is made). The failure watch reads its lines and hashes and
// compares ranks (launch/wait_board.h); every error of a wait names the collective by it. Next:
// group.h,
// ../../docs/communication.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/group.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"

namespace tessera::comm {

/// A batch without its tensors, as it is compared and printed.
struct Entry : Issue {
  Label label;
  std::uint64_t sequence = 0;  ///< counts the group's batches
  /// Equal on all ranks that mean the same collective. Into is left out: it does not travel.
  std::uint64_t fingerprint = 0;
  std::vector<OpFacts> ops;
  std::uint64_t order = 0;  ///< its number in the rank's OrderLog, where there is one

  IssueWords words() const override;
};
void describe(const Batch& batch, std::uint64_t sequence, Entry& entry);
/// "all_gather of layers.3 (#17, unit 3, micro-batch 0: 4096 B Float)".
std::string to_string(const Entry& entry);

/// The tag of one transfer: 31 bits that differ for different sequence numbers, fingerprints and
/// ops, so that Gloo never matches transfers of two collectives.
int transfer_tag(std::uint64_t fingerprint, std::uint64_t sequence, std::uint64_t op);

/// Errors: kInternal for tensors that are undefined, not contiguous, on another device, or whose
/// sizes or dtypes do not fit.
void check_batch(const Batch& batch, int ranks, at::Device device = at::kCPU);

/// Returns the same batch over twins of all tensors.
Batch cloned(const Batch& batch, const MakeTwin& make);
void deliver(const Batch& twins, const Batch& batch);

/// Runs all ops in a group of one rank, on any device.
void run_alone(const Batch& batch);

/// The group of one rank, in every backend.
class SoloGroup : public Group {
 public:
  explicit SoloGroup(std::string name, std::shared_ptr<const AbortFlag> abort_flag = nullptr)
      : name_(std::move(name)), abort_flag_(std::move(abort_flag)) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }

 private:
  std::unique_ptr<Work> start(Batch batch) override;

  std::string name_;
  std::shared_ptr<const AbortFlag> abort_flag_;
};

/// Whether other ranks pass its messages on (relay.h).
bool is_relayed(const Op& op, int ranks);
/// The bytes that `rank` of `ranks` ranks sends to all others together.
std::int64_t sent_bytes(const Op& op, int ranks, int rank);
std::int64_t sent_bytes(const Batch& batch, int ranks, int rank);

/// The last entries of one group on one rank. A caller that waits for an entry holds a copy, so the
/// entry keeps its name however long the wait takes. Threads: any.
class FlightRecorder final : public Recorded {
 public:
  /// `board`: its order log is written, too; null: there is none.
  explicit FlightRecorder(std::string group, WaitBoard* board = nullptr);
  std::shared_ptr<const Entry> record(const Batch& batch, std::uint64_t sequence);
  void clear();
  std::string lines() const override;
  IssuedHashes issued() const override;
  std::optional<BoardLane> lane() const override;
  /// Returns the wait of the entry, one of this group's, for `peer`, a world rank; -1: for all.
  PeerWait wait_for(const Entry& entry, int peer = -1) const;
  std::uint64_t group_hash() const { return group_hash_; }

 private:
  std::uint64_t what_of(const Entry& entry) const;

  struct Kept {
    std::shared_ptr<const Entry> entry;
    std::uint64_t hash_so_far = 0;  ///< of all entries up to this one
  };

  const std::string group_;
  const std::uint64_t group_hash_;
  const std::uint64_t purpose_;  // a hash of the group's purpose
  WaitBoard* const board_;
  mutable base::Mutex mutex_;
  std::array<Kept, 64> ring_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t count_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::comm
