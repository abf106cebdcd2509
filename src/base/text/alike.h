// Folds equal entries of layers into one: "model.layers.{0-2,5}.mlp x 4". Pure.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

/// A name, split at its first component that is a number, the layer's.
struct LayerName {
  std::string before, after;
  std::int64_t number = 0;
};

inline std::optional<LayerName> layer_name(const std::string& name) {
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    LayerName found{name.substr(0, begin), name.substr(end), 0};
    const char* last = name.data() + end;
    const auto [rest, failed] = std::from_chars(name.data() + begin, last, found.number);
    if (failed == std::errc{} && rest == last && end > begin) return found;
    begin = end + 1;
  }
  return std::nullopt;
}

/// Entries that are equal except for the number in their names, or a single entry.
template <class T>
struct Alike {
  T first;
  std::optional<LayerName> name;  ///< that of the first entry
  std::vector<std::int64_t> numbers;

  std::string shown(const std::string& own) const {
    if (numbers.size() < 2) return own;
    return concat(name->before, "{", ranges_text(numbers, ","), "}", name->after, " x ",
                  numbers.size());
  }
};

/// Groups `all`, in the order of first entries. `same(one, other)` compares without the names.
template <class T, class NameOf, class Same>
std::vector<Alike<T>> alike(const std::vector<T>& all, const NameOf& name_of, const Same& same) {
  std::vector<Alike<T>> groups;
  for (const T& one : all) {
    const auto name = layer_name(name_of(one));
    const auto joins = [&](const Alike<T>& group) {
      return name && group.name && group.name->before == name->before &&
             group.name->after == name->after && same(group.first, one);
    };
    const auto group = std::ranges::find_if(groups, joins);
    if (group != groups.end()) {
      group->numbers.push_back(name->number);
    } else {
      groups.push_back({one, name, {}});
      if (name) groups.back().numbers.push_back(name->number);
    }
  }
  return groups;
}

}  // namespace tessera
