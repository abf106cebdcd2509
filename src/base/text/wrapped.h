// Breaks text into lines of at most a given number of columns, for terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

/// Breaks `text` at its spaces into lines that begin with `indent` spaces and end with '\n'. A word
/// that is too long for a line has a line to itself.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t columns);

}  // namespace tessera
