#include "comm/ops/all_to_all.h"

#include <algorithm>
#include <numeric>

#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t element_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.element_size());
}

class AllToAllSteps final : public Steps {
 public:
  explicit AllToAllSteps(const AllToAll& op) : op_(op) {}

  void post_receives(Transfers& transfers, int round) override {
    const std::int64_t element = element_bytes(op_.output);
    for (int peer = 0; peer < transfers.size(); ++peer) {
      transfers.receive(peer, at_byte(op_.output, range_begin(op_.receives, peer) * element),
                        op_.receives[static_cast<std::size_t>(peer)] * element, round);
    }
  }
  void post_sends(Transfers& transfers, int round) override {
    const std::int64_t element = element_bytes(op_.input);
    const auto send = [&](int peer) {
      transfers.send(peer, at_byte(op_.input, range_begin(op_.sends, peer) * element),
                     op_.sends[static_cast<std::size_t>(peer)] * element, round);
    };
    for_successors(transfers, send);
    send(transfers.self());
  }

 private:
  const AllToAll& op_;
};

}  // namespace

OpFacts AllToAll::facts() const {
  return {Kind::kAllToAll, 0, input.scalar_type(), output.scalar_type()};
}

void AllToAll::check(const CheckedBatch& batch) const {
  batch.require_usable(input);
  batch.require_usable(output);
  for (const auto* counts : {&sends, &receives}) {
    TESSERA_INVARIANT(
        counts->size() == static_cast<std::size_t>(batch.ranks) &&
            std::all_of(counts->begin(), counts->end(), [](auto count) { return count >= 0; }),
        "all_to_all of ", batch.unit, ": found ", counts->size(),
        " counts or negative ones, expected ", batch.ranks);
  }
  TESSERA_INVARIANT(sum_of(sends) == input.numel() && sum_of(receives) == output.numel() &&
                        input.scalar_type() == output.scalar_type(),
                    "all_to_all of ", batch.unit, ": found ", input.numel(), " elements in and ",
                    output.numel(), " out, expected the sums of their counts in one dtype");
}

std::int64_t AllToAll::sent_bytes(int /*ranks*/, int rank) const {
  return (sum_of(sends) - sends[static_cast<std::size_t>(rank)]) * element_bytes(input);
}

void AllToAll::run_alone() const { output.copy_(input.view(output.sizes())); }

std::unique_ptr<Steps> AllToAll::steps(int /*ranks*/, int /*rank*/) const {
  return std::make_unique<AllToAllSteps>(*this);
}

void AllToAll::run_on_devices(const std::vector<const AllToAll*>& ranks) {
  std::vector<std::int64_t> taken(ranks.size(), 0);  // elements of each sender's input so far
  for (std::size_t to = 0; to < ranks.size(); ++to) {
    std::int64_t filled = 0;
    for (std::size_t from = 0; from < ranks.size(); ++from) {
      const std::int64_t numel = ranks[from]->sends[to];
      ranks[to]
          ->output.view(-1)
          .narrow(0, filled, numel)
          .copy_(ranks[from]->input.view(-1).narrow(0, taken[from], numel), /*non_blocking=*/true);
      filled += numel;
      taken[from] += numel;
    }
  }
}

AllToAll AllToAll::cloned(const MakeTwin& make) const {
  return {make(input, Values::kKept), sends, make(output, Values::kOverwritten), receives};
}

void AllToAll::deliver(const AllToAll& to) const { to.output.copy_(output, /*non_blocking=*/true); }

}  // namespace tessera::comm
