// How a small message is relayed (relay.h): all receives are posted at once, each round's send when
// what it passes on is here.
#pragma once

#include <vector>

#include "comm/ops/steps.h"
#include "layout/range.h"

namespace tessera::comm {

class RelayedSteps : public Steps {
 public:
  void post_receives(Transfers& transfers) final;
  void post_sends(Transfers& transfers) final { send_round(transfers, 0); }
  void finish(Transfers& transfers) final;

 protected:
  struct Sent {
    const void* from;
    std::int64_t bytes;
  };
  /// What arrives in a round, in bytes aside.
  virtual layout::Range arriving(Transfers& transfers, int round) const = 0;
  virtual Sent sent(Transfers& transfers, int round) const = 0;
  virtual void combine(Transfers& /*transfers*/, int /*round*/) {}  ///< it has arrived
  virtual void deliver(Transfers& transfers) = 0;                   ///< after the last round

 private:
  void send_round(Transfers& transfers, int round) const;
};

/// Everyone's part to everyone.
class RelayedGatherSteps : public RelayedSteps {
 public:
  /// This rank's part begins at byte `own` of `tensor`, which outlives this. Rank r's is lengths[r]
  /// bytes long.
  RelayedGatherSteps(const at::Tensor& tensor, std::vector<std::int64_t> lengths, std::int64_t own)
      : tensor_(tensor), lengths_(std::move(lengths)), own_(own) {}
  void prepare(Transfers& transfers) final;

 protected:
  std::byte* part_of(Transfers& transfers, int rank) const;

 private:
  layout::Range arriving(Transfers& transfers, int round) const final;
  Sent sent(Transfers& transfers, int round) const final;

  const at::Tensor& tensor_;
  const std::vector<std::int64_t> lengths_;
  const std::int64_t own_;
  std::vector<std::int64_t> begins_;  ///< of parts aside, as relay::begins()
};

}  // namespace tessera::comm
