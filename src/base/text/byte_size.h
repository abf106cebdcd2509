// Sizes as people write them: "80GB", "72GiB". Pure. size_text() of printable.h is the inverse.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// Parses a whole number alone, or followed by B KB MB GB TB KiB MiB GiB TiB. None for anything
/// else, for 0 and for a size beyond 64 bits.
std::optional<std::int64_t> byte_size(std::string_view text);

}  // namespace tessera
