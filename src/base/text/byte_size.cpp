#include "base/text/byte_size.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <utility>

namespace tessera {

std::optional<std::int64_t> byte_size(std::string_view text) {
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {
      {"", 1},
      {"B", 1},
      {"KB", 1000},
      {"MB", 1000 * 1000},
      {"GB", 1000 * 1000 * 1000},
      {"TB", std::int64_t{1000} * 1000 * 1000 * 1000},
      {"KiB", 1 << 10},
      {"MiB", 1 << 20},
      {"GiB", 1 << 30},
      {"TiB", std::int64_t{1} << 40}};
  std::int64_t number = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view word(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                  [&](const auto& known) { return known.first == word; });
  if (failed != std::errc{} || number <= 0 || unit == std::end(kUnits)) return std::nullopt;
  if (number > std::numeric_limits<std::int64_t>::max() / unit->second) return std::nullopt;
  return number * unit->second;
}

}  // namespace tessera
