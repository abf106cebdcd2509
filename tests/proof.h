// Two sizes of one proof: ./test runs a seeded, pairwise part of a product of cases, scripts/full
// NAME all of it. Next: pairwise.h.
#pragma once

#include <cstdint>
#include <vector>

#include "base/environment.h"
#include "pairwise.h"

namespace tessera::test {

/// TESSERA_FULL=1, which scripts/full sets.
inline bool full_proof() { return base::environment_switch("TESSERA_FULL"); }

/// The choices that this run goes through.
inline std::vector<Choice> cases(const std::vector<std::size_t>& sizes, const IsValid& is_valid,
                                 std::uint32_t seed) {
  return full_proof() ? product(sizes, is_valid) : pairwise(sizes, is_valid, seed);
}

}  // namespace tessera::test
