#include "comm/ops/steps.h"

#include <algorithm>
#include <vector>

#include "comm/relay.h"

namespace tessera::comm {

void receive_aside(Transfers& transfers, std::int64_t bytes) {
  int place = 0;
  for_others(transfers, [&](int peer) {
    transfers.receive(peer, transfers.aside(bytes * place++), bytes, 0);
  });
}

void add_received(Transfers& transfers, const void* own, at::ScalarType wire,
                  const kernels::HostSum& result) {
  const auto bytes = result.numel * static_cast<std::int64_t>(c10::elementSize(wire));
  std::vector<const void*> addends;
  addends.reserve(static_cast<std::size_t>(transfers.size()));
  int place = 0;
  for (int rank = 0; rank < transfers.size(); ++rank) {
    addends.push_back(rank == transfers.self() ? own : transfers.aside(bytes * place++));
  }
  kernels::sum_host_memory(addends, wire, result);
}

void RelayedSteps::post_receives(Transfers& transfers) {
  for (int round = 0; round < relay::rounds(transfers.size()); ++round) {
    const layout::Range part = arriving(transfers, round);
    const int from = relay::round_of(round, transfers.self(), transfers.size()).from;
    transfers.receive(from, transfers.aside(part.begin), part.size(), round);
  }
}

void RelayedSteps::send_round(Transfers& transfers, int round) const {
  const int to = relay::round_of(round, transfers.self(), transfers.size()).to;
  const auto [from, bytes] = sent(transfers, round);
  transfers.send(to, from, bytes, round);
}

void RelayedSteps::finish(Transfers& transfers) {
  std::size_t next = 0;
  const int rounds = relay::rounds(transfers.size());
  for (int round = 0; round < rounds; ++round) {
    if (arriving(transfers, round).size() > 0) transfers.finish_receive(next++);
    combine(transfers, round);
    if (round + 1 == rounds) break;
    transfers.post_more(Transfers::Earlier::kKept, [&] { send_round(transfers, round + 1); });
  }
  transfers.finish_sends();  // what is sent lies in the op's tensor, too
  deliver(transfers);
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
