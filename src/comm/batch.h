// What backends share about a Batch: its text, its fingerprint, its check, what one rank sends for
// it, and the case of one rank.
//
// The fingerprint covers everything that must agree over ranks (kinds, unit, micro-batch, bytes,
// dtypes); the text is what is printed when it does not. What is sent works out its op
// (ops/operation.h), as sends and receives between pairs of ranks: these hold what they have posted
// against sent_bytes() (backends/gloo/exchange.h); traces and tests ask the same function. The
// in-process backend moves nothing: there it is what the same ranks would send over Gloo. NCCL has
// its own ways. Next: group.h, ../../docs/communication.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/group.h"
#include "launch/poison.h"

namespace tessera::comm {

/// A batch as it is compared and printed: without its tensors.
struct Entry {
  Label label;
  std::uint64_t sequence = 0;  ///< of its group
  /// Equal on all ranks that mean the same collective. Into is left out: it is not on the wire.
  std::uint64_t fingerprint = 0;
  std::vector<OpFacts> ops;
};
void describe(const Batch& batch, std::uint64_t sequence, Entry& entry);
/// "all_gather of layers.3 (#17, unit 3, micro-batch 0: 4096 B Float)".
std::string to_string(const Entry& entry);

/// Tag of one transfer: 31 bits that differ for different sequence numbers, fingerprints and ops,
/// so that Gloo never matches transfers of two collectives.
int transfer_tag(std::uint64_t fingerprint, std::uint64_t sequence, std::uint64_t op);

/// Errors: kInternal for tensors that are undefined, not contiguous, on another device, or whose
/// sizes or dtypes do not fit.
void check_batch(const Batch& batch, int ranks, at::DeviceType device = at::kCPU);

/// All ops of a group with one rank, on any device.
void run_alone(const Batch& batch);

/// What a group of one rank is, in every backend.
class SoloGroup : public Group {
 public:
  explicit SoloGroup(std::string name, std::shared_ptr<const Poison> poison = nullptr)
      : name_(std::move(name)), poison_(std::move(poison)) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Work> issue(Batch batch) override;

 private:
  std::string name_;
  std::shared_ptr<const Poison> poison_;
};

/// Whether it travels over other ranks (relay.h).
bool is_relayed(const Op& op, int ranks);
/// By `rank` of `ranks`, to all others together.
std::int64_t sent_bytes(const Op& op, int ranks, int rank);
std::int64_t sent_bytes(const Batch& batch, int ranks, int rank);

}  // namespace tessera::comm
