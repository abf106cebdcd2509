#include "comm/ops/steps.h"

#include <algorithm>
#include <vector>

#include "comm/ops/relay.h"

namespace tessera::comm {

void sum_addends(Transfers& transfers, const void* own, at::ScalarType wire,
                 const kernels::HostSum& result) {
  std::vector<const void*> addends;
  addends.reserve(static_cast<std::size_t>(transfers.size()));
  for (int rank = 0; rank < transfers.size(); ++rank) {
    addends.push_back(rank == transfers.self() ? own : transfers.addend(rank));
  }
  kernels::sum_host_memory(addends, wire, result);
}

int RelayedSteps::rounds(int ranks) const { return relay::rounds(ranks); }

void RelayedSteps::post_receives(Transfers& transfers, int round) {
  if (round > 0) return;  // the first round posts all of them
  prepare(transfers);
  for (int later = 0; later < rounds(transfers.size()); ++later) {
    const layout::Range part = arriving(transfers, later);
    const int from = relay::round_of(later, transfers.self(), transfers.size()).from;
    transfers.receive(from, transfers.aside(part.begin), part.size(), later);
  }
}

void RelayedSteps::post_sends(Transfers& transfers, int round) {
  const int to = relay::round_of(round, transfers.self(), transfers.size()).to;
  const auto [from, bytes] = sent(transfers, round);
  transfers.send(to, from, bytes, round);
}

void RelayedSteps::combine(Transfers& transfers, int round) {
  take_in(transfers, round);
  if (round + 1 == rounds(transfers.size())) deliver(transfers);
}

void RelayedGatherSteps::prepare(Transfers& transfers) {
  begins_ = relay::begins(lengths_, transfers.self());
  transfers.take_aside(begins_.back());
  std::copy_n(at_byte(tensor_, own_), begins_[1], transfers.aside(0));
}

std::byte* RelayedGatherSteps::part_of(Transfers& transfers, int rank) const {
  const int place = relay::place_of(rank, transfers.self(), transfers.size());
  return transfers.aside(begins_[static_cast<std::size_t>(place)]);
}

layout::Range RelayedGatherSteps::arriving(Transfers& transfers, int round) const {
  const int place = 1 << round;
  const int parts = relay::parts_sent(round, transfers.size());
  return {begins_[static_cast<std::size_t>(place)],
          begins_[static_cast<std::size_t>(place + parts)]};
}

RelayedSteps::Sent RelayedGatherSteps::sent(Transfers& transfers, int round) const {
  const auto parts = static_cast<std::size_t>(relay::parts_sent(round, transfers.size()));
  return {transfers.aside(0), begins_[parts]};
}

}  // namespace tessera::comm
