// Text for messages, reports, tables and traces: what came from elsewhere, made safe to show; lists
// of names; shapes and sizes; what a unit is called.
//
// What a hostile file calls a tensor may be megabytes long or hold terminal escapes, libtorch's
// errors carry the stack of the place that threw, and a model writes whatever bytes it likes. All
// that goes to a person passes through here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "tessera/error.h"

namespace tessera {

/// `text` in single quotes: control bytes and broken UTF-8 as \xNN, cut after `max_bytes` with
/// "...".
std::string printable(std::string_view text, std::size_t max_bytes = 120);

/// Where the UTF-8 character begins that the byte at `at` belongs to.
std::size_t character_begin(std::string_view text, std::size_t at);

/// A path for a message: `printable`, long enough for any that a system takes in practice.
std::string shown(const std::filesystem::path& path);

/// "[2, 3]"; long shapes are cut after eight dims.
std::string shape_text(std::span<const std::int64_t> shape);

/// Bytes for a person: "1.86 GiB", "512 MiB", "24.0 KiB", "640 B"; three digits, powers of 1024.
std::string size_text(std::int64_t bytes);

/// What an exception says as one line, without a stack trace of libtorch's, its lines joined by
/// single spaces: a rank's report stands beside those of other ranks and travels through a store's
/// key.
std::string one_line(std::string_view what);

/// Bytes that a model writes one by one, as text that a terminal can show.
///
/// Valid UTF-8 passes as soon as a character is complete; every byte that belongs to none, and
/// control codes other than line feed, carriage return and tab, become \xNN. The same bytes give
/// the same text however they come in.
class ByteText {
 public:
  /// What can be shown now that this byte is there: nothing while a character is incomplete.
  std::string add(unsigned char byte);
  /// What is left over of an incomplete character.
  std::string finish();

 private:
  std::string pending_;  // the beginning of a character
};

/// All of a range with ", " between them; `if_none` for an empty one.
template <class Names>
std::string joined(const Names& names, std::string_view if_none = "") {
  std::string text;
  bool first = true;
  for (const auto& name : names) {
    text += concat(first ? "" : ", ", name);
    first = false;
  }
  return first ? std::string(if_none) : text;
}

/// "0-2, 5" of ascending whole numbers; after `most` ranges, how many numbers follow.
template <class Numbers>
std::string ranges_text(const Numbers& numbers, std::string_view between = ", ",
                        int most = std::numeric_limits<int>::max()) {
  std::string text;
  int ranges = 0;
  for (std::size_t i = 0; i < numbers.size(); ++ranges) {
    if (ranges == most) return concat(text, " and ", numbers.size() - i, " more");
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += concat(text.empty() ? "" : between, numbers[i]);
    if (last > i) text += concat("-", numbers[last]);
    i = last + 1;
  }
  return text;
}

/// The outermost unit of a model has no name of its own.
inline std::string_view unit_label(std::string_view name) {
  return name.empty() ? std::string_view("(root)") : name;
}

}  // namespace tessera
