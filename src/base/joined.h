// Names in a message: "a, b, c".
#pragma once

#include <string>
#include <string_view>

#include "tessera/error.h"

namespace tessera {

/// All of a range with ", " between them; `if_none` for an empty one.
template <class Names>
std::string joined(const Names& names, std::string_view if_none = "") {
  std::string text;
  bool first = true;
  for (const auto& name : names) {
    text += concat(first ? "" : ", ", name);
    first = false;
  }
  return first ? std::string(if_none) : text;
}

}  // namespace tessera
