// A quantity in three digits, as sizes, counts and operations are shown to a person.
#pragma once

#include <string>

namespace tessera {

/// "9.99", "64.0", "999", whatever is larger without decimals. `value` is at least 0.
std::string three_digits(double value);

}  // namespace tessera
