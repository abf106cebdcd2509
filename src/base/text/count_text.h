// A count with its noun, as a person writes it. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/error.h"

namespace tessera {

/// Returns "1 rank", "64 ranks", "2 micro-batches".
inline std::string count_text(std::int64_t count, std::string_view one) {
  if (count == 1) return concat(count, " ", one);
  return concat(count, " ", one, one.ends_with("ch") ? "es" : "s");
}

}  // namespace tessera
