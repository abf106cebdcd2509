#include "capture/offload_pass.h"

#include <algorithm>
#include <optional>

namespace tessera::capture {
namespace {

using fsdp::StateBytes;
using fsdp::UnitId;

/// With one more unit.
StateBytes with(StateBytes sum, const StateBytes& unit) {
  return {sum.bytes + unit.bytes, std::max(sum.largest_part, unit.largest_part)};
}

StateBytes sum_of(const std::vector<StateBytes>& state, const std::vector<UnitId>& units) {
  StateBytes sum;
  for (const auto unit : units) sum = with(sum, state.at(unit));
  return sum;
}

std::int64_t in_memory(std::int64_t all, const StateBytes& outside) {
  return all - outside.bytes + fsdp::buffer_bytes(outside);
}

}  // namespace

std::int64_t state_in_memory(const std::vector<StateBytes>& state,
                             const std::vector<UnitId>& offloaded) {
  return in_memory(fsdp::sum_of(state).bytes, sum_of(state, offloaded));
}

std::vector<UnitId> offloaded_for(const std::vector<StateBytes>& state,
                                  std::vector<UnitId> offloaded, std::int64_t most_bytes) {
  const auto all = fsdp::sum_of(state).bytes;
  auto outside = sum_of(state, offloaded);
  auto least = in_memory(all, outside);
  auto best = offloaded;
  std::vector<bool> is_out(state.size(), false);
  for (const auto unit : offloaded) is_out.at(unit) = true;
  while (least > most_bytes) {
    std::optional<UnitId> enough, most;
    for (UnitId unit = 0; unit < state.size(); ++unit) {
      if (is_out[unit] || state[unit].bytes == 0) continue;
      const auto left = in_memory(all, with(outside, state[unit]));
      // Of equals the later one, whose gradients are there first.
      if (left <= most_bytes && (!enough || state[unit].bytes <= state[*enough].bytes)) {
        enough = unit;
      }
      if (!most || left <= in_memory(all, with(outside, state[*most]))) most = unit;
    }
    if (!most) break;
    const auto taken = enough.value_or(*most);
    is_out[taken] = true;
    outside = with(outside, state[taken]);
    offloaded.push_back(taken);
    // A first large part may cost more than it brings, until others come.
    if (in_memory(all, outside) < least) {
      least = in_memory(all, outside);
      best = offloaded;
    }
  }
  std::ranges::sort(best);
  return best;
}

}  // namespace tessera::capture
