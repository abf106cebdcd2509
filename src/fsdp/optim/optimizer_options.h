// What an optimizer's numbers may be.
#pragma once

#include <limits>

#include "tessera/error.h"

namespace tessera::fsdp {

/// At least 0 and below `highest`, which stays outside. Errors: kUsage.
inline void check_option(const char* name, double value,
                         double highest = std::numeric_limits<double>::infinity()) {
  TESSERA_CHECK(value >= 0 && value < highest, ErrorKind::kUsage, "optimizer: found ", name, " ",
                value, ", expected at least 0 and below ", highest);
}

}  // namespace tessera::fsdp
