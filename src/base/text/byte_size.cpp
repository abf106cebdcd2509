#include "base/text/byte_size.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <limits>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

std::optional<std::int64_t> byte_size(std::string_view text) {
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {
      {"", 1},
      {"k", 1000},
      {"m", 1000 * 1000},
      {"g", 1000 * 1000 * 1000},
      {"t", std::int64_t{1000} * 1000 * 1000 * 1000},
      {"ki", 1 << 10},
      {"mi", 1 << 20},
      {"gi", 1 << 30},
      {"ti", std::int64_t{1} << 40}};
  std::int64_t number = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string word(rest, text.data() + text.size());
  std::ranges::transform(word, word.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (word.ends_with('b')) word.pop_back();
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                  [&](const auto& known) { return known.first == word; });
  if (failed != std::errc{} || number <= 0 || unit == std::end(kUnits)) return std::nullopt;
  if (number > std::numeric_limits<std::int64_t>::max() / unit->second) return std::nullopt;
  return number * unit->second;
}

std::string exact_size_text(std::int64_t bytes) {
  return concat(bytes, " bytes", bytes < 1024 ? "" : concat(" (", size_text(bytes), ")"));
}

}  // namespace tessera
