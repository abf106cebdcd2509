// Sizes as people write them: "80GB", "72GiB". Pure. size_text() of printable.h is the inverse.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Parses a whole number alone, or followed by B KB MB GB TB (powers of 1000) or KiB MiB GiB TiB
/// (of 1024), in any case and with or without the B: "80G" is 80GB, "80Gi" is 80GiB. None for
/// anything else, for 0 and for a size beyond 64 bits.
std::optional<std::int64_t> byte_size(std::string_view text);

/// Parses any decimal number with such a unit, also fractions: "3.35TB" is 3.35e12. None for a
/// number of more than 40 characters, and for a number that a double does not hold.
std::optional<double> byte_amount(std::string_view text);
/// Returns the shortest text with a unit of powers of 1000 that byte_amount() reads as this number.
std::string amount_text(double bytes);

/// Returns "1000 bytes", "197472672 bytes (188 MiB)": a number to copy, and one to read.
std::string exact_size_text(std::int64_t bytes);

}  // namespace tessera
