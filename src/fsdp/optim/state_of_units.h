// What an optimizer keeps of each unit, in bytes, and what of it is in memory where some of it is
// offloaded. Pure: what forecasts, passes and the update itself go by. Next: offloaded_state.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/model_plan.h"
#include "tessera/contract.h"

namespace tessera::fsdp {

/// Elements of a shard whose float32 values an optimizer forms at a time, and of which what is
/// offloaded lies together. Kernels that divide a tensor by cache lines treat parts of this size as
/// they would the whole: the bits of an update do not depend on it.
inline constexpr std::int64_t kMasterPart = std::int64_t{1} << 20;

/// Offloaded state that is read, updated and written at once, at most, but for a larger part.
inline constexpr std::int64_t kMostChunkBytes = std::int64_t{16} << 20;

/// Of tensors with these element sizes, as they lie in a tier: each begins at a whole cache line.
std::int64_t part_bytes(std::span<const std::int64_t> element_sizes, std::int64_t numel);
/// Of all parts of a parameter.
std::int64_t kept_bytes(std::span<const std::int64_t> element_sizes, std::int64_t numel);

/// Of the rank that has most.
struct StateBytes {
  std::int64_t bytes = 0;
  std::int64_t largest_part = 0;
  bool operator==(const StateBytes&) const = default;
};

/// By unit, for an optimizer that keeps `states` tensors of each parameter, and masters. Units of
/// frozen parameters have none. `contracts`: of all parameters of the plan.
std::vector<StateBytes> state_of_units(const layout::ModelPlan& plan,
                                       const std::vector<GradContract>& contracts, int states);

/// Several units' together.
StateBytes sum_of(const std::vector<StateBytes>& units);
/// Of one chunk where `offloaded` is what lies outside: an eighth of it, so that a small model
/// gains, too.
std::int64_t chunk_bytes(const StateBytes& offloaded);
/// What two chunks take; nothing where nothing is offloaded.
inline std::int64_t buffer_bytes(const StateBytes& offloaded) {
  return offloaded.bytes == 0 ? 0 : 2 * chunk_bytes(offloaded);
}

}  // namespace tessera::fsdp
