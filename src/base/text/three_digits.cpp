#include "base/text/three_digits.h"

#include <array>
#include <charconv>

namespace tessera {

std::string three_digits(double value) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::array<char, 512> digits{};  // the largest double has 309
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value,
                                 std::chars_format::fixed, decimals)
                       .ptr;
  return {digits.data(), end};
}

}  // namespace tessera
