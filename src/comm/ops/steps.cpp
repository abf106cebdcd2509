#include "comm/ops/steps.h"

#include <vector>

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

}  // namespace tessera::comm
