// For backward passes that have no derivative of their own.
#pragma once

#include <c10/core/GradMode.h>

#include "tessera/error.h"

namespace tessera::base {

/// A graph built over such a backward (create_graph) would be silently wrong.
/// Errors: kUsage.
inline void refuse_double_backward() {
  TESSERA_CHECK(
      !c10::GradMode::is_enabled(), ErrorKind::kUsage,
      "backward: found create_graph, expected none; second derivatives are not supported");
}

}  // namespace tessera::base
