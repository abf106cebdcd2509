// RecomputeMode: what a checkpointed block forgets between forward and backward. Next: recompute.h.
#pragma once

#include <cstdint>

namespace tessera {

enum class RecomputeMode : std::uint8_t {
  kNone,       ///< nothing: a plain call
  kFull,       ///< all but its inputs
  kSelective,  ///< all but its inputs and what keep() was given: the results of weight products
};

}  // namespace tessera
