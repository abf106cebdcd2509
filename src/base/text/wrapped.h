// Text in lines of at most so many columns, for terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

/// `text` broken at its spaces, each line behind `indent` spaces and with its end. A word that is too
/// long for a line has one of its own.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t columns);

}  // namespace tessera
