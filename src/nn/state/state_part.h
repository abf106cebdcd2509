// StatePart: the parts of a layer with a state that a document's border ends. Next: delta_net.h.
#pragma once

#include <cstdint>

#include "base/test_hooks.h"
#include "nn/documents.h"

namespace tessera::nn {

enum class StatePart : std::uint8_t {
  kConvolution,  ///< sees the few positions before each one
  kRecurrence,   ///< carries the state from position to position
};

/// The documents that a part of a layer goes by: those of the rows, but for a test's fault.
inline Documents documents_of(StatePart part, const Documents& of_rows) {
  const auto* instead = test_hooks::starts_of_state.get();
  return instead == nullptr || !of_rows.are_packed() ? of_rows
                                                     : Documents{(*instead)(part, of_rows.starts)};
}

}  // namespace tessera::nn
