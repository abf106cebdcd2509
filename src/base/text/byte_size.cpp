#include "base/text/byte_size.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <system_error>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

namespace {

struct ByteUnit {
  std::string_view word;  ///< in lower case, without the b
  int power = 0;          ///< power of 10
  int shift = 0;          ///< power of 2
  std::int64_t bytes() const {
    std::int64_t value = 1;
    for (int i = 0; i < power; ++i) value *= 10;
    return value << shift;
  }
};
constexpr ByteUnit kByteUnits[] = {{"", 0},       {"k", 3},      {"m", 6},
                                   {"g", 9},      {"t", 12},     {"ki", 0, 10},
                                   {"mi", 0, 20}, {"gi", 0, 30}, {"ti", 0, 40}};

/// Returns the unit with this word, or null.
const ByteUnit* unit_called(std::string_view text) {
  std::string word(text);
  std::ranges::transform(word, word.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (word.ends_with('b')) word.pop_back();
  const auto* const unit = std::ranges::find(kByteUnits, word, &ByteUnit::word);
  return unit == std::end(kByteUnits) ? nullptr : unit;
}

}  // namespace

std::optional<std::int64_t> byte_size(std::string_view text) {
  std::int64_t number = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  const ByteUnit* unit = unit_called({rest, text.data() + text.size()});
  if (failed != std::errc{} || number <= 0 || unit == nullptr) return std::nullopt;
  if (number > std::numeric_limits<std::int64_t>::max() / unit->bytes()) return std::nullopt;
  return number * unit->bytes();
}

std::optional<double> byte_amount(std::string_view text) {
  constexpr std::size_t kLongest = 40;
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view digits = text.substr(0, end);
  const ByteUnit* unit = unit_called(text.substr(end));
  if (digits.size() > kLongest || unit == nullptr) return std::nullopt;
  // Parses one decimal number, so that it is rounded once.
  const std::string number = concat(digits, "e", unit->power);
  double value = 0.0;
  const auto [rest, failed] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (failed != std::errc{} || rest != number.data() + number.size()) return std::nullopt;
  return std::ldexp(value, unit->shift);
}

std::string amount_text(double bytes) {
  std::array<char, 40> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), bytes,
                                 std::chars_format::scientific)
                       .ptr;
  const std::string_view text(digits.data(), end);
  const std::size_t e = text.find('e');
  int power = 0;  // from_chars takes no plus
  const char* const first = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(first, text.data() + text.size(), power);
  std::string mantissa(text.substr(0, e));
  std::erase(mantissa, '.');
  const int unit = std::clamp(power / 3, 0, 4);
  const int whole = power - 3 * unit + 1;  // digits before the point
  if (whole <= 0) mantissa.insert(0, static_cast<std::size_t>(1 - whole), '0');
  const auto before = static_cast<std::size_t>(std::max(whole, 1));
  if (mantissa.size() < before) mantissa.append(before - mantissa.size(), '0');
  if (mantissa.size() > before) mantissa.insert(before, ".");
  constexpr std::array<std::string_view, 5> kWords{"B", "kB", "MB", "GB", "TB"};
  return concat(mantissa, kWords.at(static_cast<std::size_t>(unit)));
}

std::string exact_size_text(std::int64_t bytes) {
  return concat(bytes, " bytes", bytes < 1024 ? "" : concat(" (", size_text(bytes), ")"));
}

}  // namespace tessera
