#include "comm/ops/relayed_gather.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/ops/steps.h"
#include "comm/relay.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

class BytesSteps final : public RelayedGatherSteps {
 public:
  BytesSteps(const RelayedGather& op, int rank)
      : RelayedGatherSteps(op.bytes, op.lengths, stretch_begin(op.lengths, rank)), op_(op) {}

 private:
  void deliver(Transfers& transfers) override {
    std::int64_t begin = 0;
    for (int rank = 0; rank < transfers.size(); ++rank) {
      const std::int64_t length = op_.lengths[static_cast<std::size_t>(rank)];
      if (rank != transfers.self()) {
        std::copy_n(part_of(transfers, rank), length, at_byte(op_.bytes, begin));
      }
      begin += length;
    }
  }

  const RelayedGather& op_;
};

}  // namespace

OpFacts RelayedGather::facts() const {
  return {Kind::kAllGather, nbytes(bytes), bytes.scalar_type(), bytes.scalar_type(), true};
}

void RelayedGather::check(const CheckedBatch& batch) const {
  batch.require_usable(bytes);
  const auto all = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  TESSERA_INVARIANT(
      lengths.size() == static_cast<std::size_t>(batch.ranks) && bytes.scalar_type() == at::kByte &&
          all == bytes.numel() &&
          std::all_of(lengths.begin(), lengths.end(), [](auto one) { return one >= 0; }),
      "relayed gather of ", batch.unit, ": found ", bytes.numel(), " elements and ", lengths.size(),
      " lengths of ", all, " in all, expected bytes, and the lengths of ", batch.ranks, " ranks");
}

std::int64_t RelayedGather::sent_bytes(int /*ranks*/, int rank) const {
  return relay::gathered_bytes_sent(lengths, rank);
}

std::unique_ptr<Steps> RelayedGather::steps(int /*ranks*/, int rank) const {
  return std::make_unique<BytesSteps>(*this, rank);
}

void RelayedGather::run(const std::vector<const RelayedGather*>& ranks) {
  std::int64_t begin = 0;
  for (std::size_t from = 0; from < ranks.size(); ++from) {
    const std::int64_t length = ranks[from]->lengths[from];
    for (const auto* to : ranks) {
      if (to == ranks[from] || length == 0) continue;
      std::memcpy(at_byte(to->bytes, begin), at_byte(ranks[from]->bytes, begin),
                  static_cast<std::size_t>(length));
    }
    begin += length;
  }
}

RelayedGather RelayedGather::cloned() const { return {bytes.clone(), lengths}; }

void RelayedGather::deliver(const RelayedGather& to) const { to.bytes.copy_(bytes); }

}  // namespace tessera::comm
