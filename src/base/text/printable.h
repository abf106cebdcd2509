// Text for messages, reports, tables and traces: makes text from elsewhere safe to show; prints
// lists of names, shapes, sizes and unit names.
//
// The name of a tensor in a hostile file may be megabytes long or contain terminal escapes, errors
// of libtorch contain the stack of the place that threw, and a model writes any bytes. All text
// that a person sees passes through here.
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

/// Returns `text` in single quotes: control bytes and broken UTF-8 as \xNN, cut after `max_bytes`
/// with "...".
std::string printable(std::string_view text, std::size_t max_bytes = 120);

/// Returns where the UTF-8 character of the byte at `at` begins.
std::size_t character_begin(std::string_view text, std::size_t at);

/// Returns a path for a message: printable(), long enough for any path that systems accept in
/// practice.
std::string shown(const std::filesystem::path& path);

/// Returns "[2, 3]"; long shapes are cut after eight dims.
std::string shape_text(std::span<const std::int64_t> shape);

/// Returns "1.86 GiB", "512 MiB", "24.0 KiB", "640 B": three digits, units of powers of 1024.
std::string size_text(std::int64_t bytes);

/// Returns the message of an exception as one line, without a stack trace of libtorch, its lines
/// joined by single spaces: it is shown together with messages of other ranks, and sent as a key of
/// a store.
std::string one_line(std::string_view what);

/// Turns bytes that a model writes one by one into text that a terminal can show.
///
/// Valid UTF-8 passes as soon as a character is complete; every byte that belongs to none, and
/// control codes other than line feed, carriage return and tab, become \xNN. The same bytes give
/// the same text however they come in.
class ByteText {
 public:
  /// Returns the text that can be shown after this byte: none while a character is incomplete.
  std::string add(unsigned char byte);
  /// Returns the text of an incomplete character at the end.
  std::string finish();

 private:
  std::string pending_;  // the beginning of a character
};

/// Returns the items of a range with ", " between them; `if_none` for an empty one.
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

/// Returns "0-2, 5" for ascending whole numbers; after `most` ranges, how many numbers follow.
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

/// Returns the unit's name for messages, since the outermost unit of a model has none.
inline std::string_view unit_label(std::string_view name) {
  return name.empty() ? std::string_view("(root)") : name;
}

}  // namespace tessera
