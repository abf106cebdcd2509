#include "comm/ops/all_gather.h"

#include "comm/ops/steps.h"
#include "layout/bucket_plan.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Sends this rank's slice from the buffer directly into the buffer of every other rank.
class AllGatherSteps final : public Steps {
 public:
  explicit AllGatherSteps(const AllGather& op, int ranks)
      : buffer_(op.buffer), slice_(nbytes(op.buffer) / ranks) {}

  void post_receives(Transfers& transfers, int round) override {
    for_others(transfers, [&](int peer) {
      transfers.receive(peer, at_byte(buffer_, slice_ * peer), slice_, round);
    });
  }
  void post_sends(Transfers& transfers, int round) override {
    for_successors(transfers, [&](int peer) {
      transfers.send(peer, at_byte(buffer_, slice_ * transfers.self()), slice_, round);
    });
  }

 private:
  const at::Tensor& buffer_;
  const std::int64_t slice_;
};

}  // namespace

OpFacts AllGather::facts() const {
  return {Kind::kAllGather, nbytes(buffer), buffer.scalar_type(), buffer.scalar_type()};
}

void AllGather::check(const CheckedBatch& batch) const {
  batch.require_usable(buffer);
  TESSERA_INVARIANT(buffer.numel() % batch.ranks == 0, "all_gather of ", batch.unit, ": found ",
                    buffer.numel(), " elements, expected a multiple of ", batch.ranks);
}

std::int64_t AllGather::sent_bytes(int ranks, int /*rank*/) const {
  return layout::sent_bytes(nbytes(buffer), ranks);
}

std::unique_ptr<Steps> AllGather::steps(int ranks, int /*rank*/) const {
  return std::make_unique<AllGatherSteps>(*this, ranks);
}

void AllGather::run_on_devices(const std::vector<const AllGather*>& ranks) {
  const std::int64_t slice = ranks.front()->buffer.numel() / std::ssize(ranks);
  for (std::int64_t from = 0; from < std::ssize(ranks); ++from) {
    const auto place = [&](const AllGather& op) {
      return op.buffer.view(-1).narrow(0, slice * from, slice);
    };
    const AllGather& source = *ranks[static_cast<std::size_t>(from)];
    for (const auto* to : ranks) {
      if (to != &source) place(*to).copy_(place(source), /*non_blocking=*/true);
    }
  }
}

AllGather AllGather::cloned(const MakeTwin& make) const {
  return {make(buffer, Values::kKept), bucket};
}

void AllGather::deliver(const AllGather& to) const {
  to.buffer.copy_(buffer, /*non_blocking=*/true);
}

}  // namespace tessera::comm
