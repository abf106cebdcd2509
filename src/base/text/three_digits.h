// Prints a quantity with three digits, for sizes, counts and operations.
#pragma once

#include <string>

namespace tessera {

/// Returns "9.99", "64.0", "999", and larger numbers without decimals. `value` must be at least 0.
std::string three_digits(double value);

}  // namespace tessera
