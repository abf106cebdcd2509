#include "comm/ops/all_reduce.h"

#include <ATen/ops/empty.h>

#include "comm/ops/steps.h"
#include "kernels/host_sum.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// The most bytes of all ranks' addends together with which an all-reduce takes one round, in which
/// each rank sends all of its addends to every other rank.
constexpr std::int64_t kOneRoundBytes = std::int64_t{256} << 10;

kernels::HostSum into_result(const AllReduce& op, const layout::Range& part) {
  const at::Tensor& result = op.result();
  const auto element = static_cast<std::int64_t>(result.element_size());
  return {at_byte(result, part.begin * element), result.scalar_type(), part.size(),
          /*adds=*/false};
}

layout::Range all_of(const AllReduce& op) { return {0, op.data.numel()}; }

/// Sums in one or two rounds, as in_two_rounds() says.
class DirectSumSteps final : public Steps {
 public:
  DirectSumSteps(const AllReduce& op, int ranks, int self)
      : op_(op),
        ranks_(ranks),
        in_two_(in_two_rounds(op, ranks)),
        mine_(in_two_ ? summed_by(op, ranks, self) : all_of(op)),
        element_(static_cast<std::int64_t>(op.data.element_size())),
        sum_element_(static_cast<std::int64_t>(op.result().element_size())) {}

  int rounds(int /*ranks*/) const override { return in_two_ ? 2 : 1; }
  void post_receives(Transfers& transfers, int round) override {
    if (round == 0) return transfers.receive_addends(mine_.size() * element_);
    for_others(transfers, [&](int peer) {
      const layout::Range part = summed_by(op_, ranks_, peer);
      transfers.receive(peer, at_byte(op_.result(), part.begin * sum_element_),
                        part.size() * sum_element_, round);
    });
  }
  void post_sends(Transfers& transfers, int round) override {
    if (round == 0) {
      for_successors(transfers, [&](int peer) {
        const layout::Range part = in_two_ ? summed_by(op_, ranks_, peer) : mine_;
        transfers.send(peer, at_byte(op_.data, part.begin * element_), part.size() * element_,
                       round);
      });
      return;
    }
    const void* sum = into_result(op_, mine_).data;
    for_others(transfers,
               [&](int peer) { transfers.send(peer, sum, mine_.size() * sum_element_, round); });
  }
  void combine(Transfers& transfers, int round) override {
    if (round > 0) return;
    const kernels::HostSum sum = into_result(op_, mine_);
    // In place, the sum overwrites this rank's addends, which other ranks may still read.
    transfers.before_overwriting(sum.data, mine_.size() * sum_element_);
    sum_addends(transfers, at_byte(op_.data, mine_.begin * element_), op_.data.scalar_type(), sum);
  }

 private:
  const AllReduce& op_;
  const int ranks_;
  const bool in_two_;
  const layout::Range mine_;        ///< the part that this rank sums
  const std::int64_t element_;      ///< bytes of an addend
  const std::int64_t sum_element_;  ///< bytes of a sum
};

/// Gathers the addends of all ranks by relay; then every rank adds them in rank order.
class RelayedSumSteps final : public RelayedGatherSteps {
 public:
  RelayedSumSteps(const AllReduce& op, int ranks)
      : RelayedGatherSteps(op.data, std::vector(static_cast<std::size_t>(ranks), nbytes(op.data)),
                           0),
        op_(op) {}

 private:
  void deliver(Transfers& transfers) override {
    std::vector<const void*> addends;
    for (int rank = 0; rank < transfers.size(); ++rank) {
      addends.push_back(part_of(transfers, rank));
    }
    kernels::sum_host_memory(addends, op_.data.scalar_type(), into_result(op_, all_of(op_)));
  }

  const AllReduce& op_;
};

}  // namespace

bool in_two_rounds(const AllReduce& op, int ranks) {
  return ranks > 2 && nbytes(op.data) * ranks > kOneRoundBytes;
}

layout::Range summed_by(const AllReduce& op, int ranks, int rank) {
  return layout::part_of(op.data.numel(), ranks, rank);
}

OpFacts AllReduce::facts() const {
  return {Kind::kAllReduce, nbytes(data), data.scalar_type(), result().scalar_type(),
          route == Route::kRelayed};
}

void AllReduce::check(const CheckedBatch& batch) const {
  batch.require_usable(data);
  batch.require_usable(result());
  TESSERA_INVARIANT(data.numel() == result().numel(), "all_reduce of ", batch.unit, ": found ",
                    data.numel(), " elements in and ", result().numel(), " out");
  TESSERA_INVARIANT(kernels::can_sum(data.scalar_type(), result().scalar_type()), "all_reduce of ",
                    batch.unit, ": cannot add ", c10::toString(data.scalar_type()), " into ",
                    c10::toString(result().scalar_type()));
}

std::int64_t AllReduce::sent_bytes(int ranks, int rank) const {
  if (!in_two_rounds(*this, ranks)) return (ranks - 1) * nbytes(data);
  const std::int64_t own = summed_by(*this, ranks, rank).size();
  return (data.numel() - own) * static_cast<std::int64_t>(data.element_size()) +
         (ranks - 1) * own * static_cast<std::int64_t>(result().element_size());
}

bool AllReduce::is_relayed(int ranks) const {
  return route == Route::kRelayed && !in_two_rounds(*this, ranks);
}

void AllReduce::run_alone() const {
  if (output.defined()) output.copy_(data.view(output.sizes()));
}

std::unique_ptr<Steps> AllReduce::steps(int ranks, int rank) const {
  if (is_relayed(ranks)) return std::make_unique<RelayedSumSteps>(*this, ranks);
  return std::make_unique<DirectSumSteps>(*this, ranks, rank);
}

void AllReduce::run_on_devices(const std::vector<const AllReduce*>& ranks) {
  const at::Tensor& first = ranks.front()->result();
  std::vector<at::Tensor> addends;
  for (const auto* one : ranks) {
    addends.push_back(one->data.view(-1).to(first.device(), /*non_blocking=*/true));
  }
  // A separate tensor: in place, a result is also an addend of the other ranks' sums.
  const at::Tensor sum = at::empty({first.numel()}, first.options());
  kernels::sum_in_rank_order(addends, sum, /*adds=*/false);
  for (const auto* to : ranks) to->result().view(-1).copy_(sum, /*non_blocking=*/true);
}

AllReduce AllReduce::cloned(const MakeTwin& make) const {
  return {make(data, Values::kKept), output.defined() ? make(output, Values::kOverwritten) : output,
          route};
}

void AllReduce::deliver(const AllReduce& to) const {
  to.result().copy_(result(), /*non_blocking=*/true);
}

}  // namespace tessera::comm
