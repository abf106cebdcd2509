// Sizes as people write them: "80GB", "72GiB". Pure. size_text() of printable.h is the inverse.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Parses a whole number alone, or followed by B KB MB GB TB (powers of 1000) or KiB MiB GiB TiB (of
/// 1024), in any case and with or without the B: "80G" is 80GB, "80Gi" is 80GiB. None for anything
/// else, for 0 and for a size beyond 64 bits.
std::optional<std::int64_t> byte_size(std::string_view text);

/// "1000 bytes", "197472672 bytes (188 MiB)": a number to copy, and one to read.
std::string exact_size_text(std::int64_t bytes);

}  // namespace tessera
