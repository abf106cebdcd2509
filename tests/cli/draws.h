// Draws of a property, each of a seed of its own: as many as TESSERA_CHECK_DRAWS says, from
// TESSERA_CHECK_FROM on.
#pragma once

#include <cstdint>
#include <random>

#include "proof.h"
#include "support/test.h"

namespace tessera::cli {

/// `few`: how many without the full proof, which has 200.
template <class Draw>
void each_draw(std::uint64_t few, const Draw& draw) {
  const auto from = test::environment_number("TESSERA_CHECK_FROM", 1);
  const auto count =
      test::environment_number("TESSERA_CHECK_DRAWS", test::full_proof() ? 200 : few);
  for (std::uint64_t seed = from; seed < from + count; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(static_cast<std::uint32_t>(seed) * 2654435761U);
    draw(random);
  }
}

}  // namespace tessera::cli
