#include "comm/ops/relayed.h"

#include <algorithm>
#include <numeric>

#include "comm/ops/relay.h"
#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

void refuse_devices() {
  TESSERA_INVARIANT(false, "a relayed message must be in the host's memory");
}

class BytesSteps final : public RelayedGatherSteps {
 public:
  BytesSteps(const RelayedGather& op, int rank)
      : RelayedGatherSteps(op.bytes, op.lengths, range_begin(op.lengths, rank)), op_(op) {}

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

void RelayedGather::run_on_devices(const std::vector<const RelayedGather*>& /*ranks*/) {
  refuse_devices();
}

RelayedGather RelayedGather::cloned(const MakeTwin& make) const {
  return {make(bytes, Values::kKept), lengths};
}

void RelayedGather::deliver(const RelayedGather& to) const { to.bytes.copy_(bytes); }

namespace {

/// Combines the values that arrive in a round with the result of the round before, and sends the
/// new result in the next round.
class CombineSteps final : public RelayedSteps {
 public:
  explicit CombineSteps(const Combine& op) : op_(op), bytes_(nbytes(op.values)) {}

 private:
  void prepare(Transfers& transfers) override {
    transfers.take_aside(bytes_ * rounds(transfers.size()));
  }
  layout::Range arriving(Transfers& /*transfers*/, int round) const override {
    return {bytes_ * round, bytes_ * (round + 1)};
  }
  Sent sent(Transfers& transfers, int round) const override {
    return {combined_before(transfers, round), bytes_};
  }

  void take_in(Transfers& transfers, int round) override {
    const void* before = combined_before(transfers, round);
    std::byte* received = transfers.aside(bytes_ * round);
    if (op_.way == Combine::Way::kSum) {
      relay::add_round(round, transfers.size(), op_.values.size(1),
                       static_cast<const std::int64_t*>(before),
                       reinterpret_cast<std::int64_t*>(received));
      return;
    }
    const auto* bits = static_cast<const std::byte*>(before);
    for (std::int64_t i = 0; i < bytes_; ++i) received[i] |= bits[i];
  }

  void deliver(Transfers& transfers) override {
    // The first round sends this rank's values from the memory that the result overwrites.
    transfers.before_overwriting(op_.values.const_data_ptr(), bytes_);
    const int ranks = transfers.size();
    const auto* all = static_cast<const std::byte*>(combined_before(transfers, rounds(ranks)));
    const bool second = op_.way == Combine::Way::kSum && relay::row_of_sum(ranks) == 1;
    const std::int64_t begin = second ? bytes_ / 2 : 0;
    std::copy_n(all + begin, bytes_ - begin, at_byte(op_.values, 0));
  }

  /// Returns the result of the rounds before `round`: for round 0 the values of the op.
  const void* combined_before(Transfers& transfers, int round) const {
    if (round == 0) return op_.values.const_data_ptr();
    return transfers.aside(bytes_ * (round - 1));
  }

  const Combine& op_;
  const std::int64_t bytes_;
};

}  // namespace

OpFacts Combine::facts() const {
  return {way == Way::kSum ? Kind::kSumOf : Kind::kAnyOf, nbytes(values), values.scalar_type(),
          values.scalar_type(), true};
}

void Combine::check(const CheckedBatch& batch) const {
  batch.require_usable(values);
  TESSERA_INVARIANT(
      way == Way::kSum
          ? values.scalar_type() == at::kLong && values.dim() == 2 && values.size(0) == 2
          : values.scalar_type() == at::kByte,
      to_string(batch.kind), " of ", batch.unit, ": found ", values.sizes(), " of ",
      c10::toString(values.scalar_type()), ", expected bytes, or int64 [2, n] for a sum");
}

std::int64_t Combine::sent_bytes(int ranks, int /*rank*/) const {
  return relay::rounds(ranks) * nbytes(values);
}

std::unique_ptr<Steps> Combine::steps(int /*ranks*/, int /*rank*/) const {
  return std::make_unique<CombineSteps>(*this);
}

void Combine::run_on_devices(const std::vector<const Combine*>& /*ranks*/) { refuse_devices(); }

Combine Combine::cloned(const MakeTwin& make) const { return {make(values, Values::kKept), way}; }

void Combine::deliver(const Combine& to) const { to.values.copy_(values); }

}  // namespace tessera::comm
