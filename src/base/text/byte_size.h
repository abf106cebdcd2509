// Sizes as people write them: "80GB", "72GiB". Pure. The other way round: size_text of printable.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// Bytes of a whole number alone, or with B KB MB GB TB KiB MiB GiB TiB behind it. None for anything
/// else, for 0 and for more than 64 bits count.
std::optional<std::int64_t> byte_size(std::string_view text);

}  // namespace tessera
