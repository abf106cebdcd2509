// What a unit is called in messages, tables and traces.
#pragma once

#include <string_view>

namespace tessera {

/// The outermost unit of a model has no name of its own.
inline std::string_view unit_label(std::string_view name) {
  return name.empty() ? std::string_view("(root)") : name;
}

}  // namespace tessera
