#include "comm/ops/broadcast.h"

#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Sends from the source to every other rank directly.
class BroadcastSteps final : public Steps {
 public:
  explicit BroadcastSteps(const Broadcast& op) : op_(op) {}

  void post_receives(Transfers& transfers, int round) override {
    if (transfers.self() == op_.source) return;
    transfers.receive(op_.source, op_.data.mutable_data_ptr(), nbytes(op_.data), round);
  }
  void post_sends(Transfers& transfers, int round) override {
    if (transfers.self() != op_.source) return;
    for_successors(transfers, [&](int peer) {
      transfers.send(peer, op_.data.const_data_ptr(), nbytes(op_.data), round);
    });
  }

 private:
  const Broadcast& op_;
};

}  // namespace

OpFacts Broadcast::facts() const {
  return {Kind::kBroadcast, nbytes(data), data.scalar_type(), data.scalar_type()};
}

void Broadcast::check(const CheckedBatch& batch) const {
  batch.require_usable(data);
  TESSERA_INVARIANT(source >= 0 && source < batch.ranks, "broadcast of ", batch.unit,
                    ": found the source ", source, ", expected one of ", batch.ranks, " ranks");
}

std::int64_t Broadcast::sent_bytes(int ranks, int rank) const {
  return rank == source ? (ranks - 1) * nbytes(data) : 0;
}

std::unique_ptr<Steps> Broadcast::steps(int /*ranks*/, int /*rank*/) const {
  return std::make_unique<BroadcastSteps>(*this);
}

void Broadcast::run_on_devices(const std::vector<const Broadcast*>& ranks) {
  const Broadcast& from = *ranks[static_cast<std::size_t>(ranks.front()->source)];
  for (const auto* to : ranks) {
    if (to != &from) to->data.copy_(from.data, /*non_blocking=*/true);
  }
}

Broadcast Broadcast::cloned(const MakeTwin& make) const {
  return {make(data, Values::kKept), source};
}

void Broadcast::deliver(const Broadcast& to) const { to.data.copy_(data, /*non_blocking=*/true); }

}  // namespace tessera::comm
