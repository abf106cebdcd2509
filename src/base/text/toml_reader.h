// TOML as values with their places in the text, and values as TOML. Pure.
//
// Texts may be hostile: their size and depth are limited before they are parsed. Dates and times
// are refused, since nothing here uses them. Callers define the meaning of keys: ../../train/config
// reads a run's configuration, ../../check/machine.h a machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// A place, counted from 1; 0 where a value is not from a text.
struct TomlPlace {
  std::size_t line = 0;
  std::size_t column = 0;
};

struct TomlEntry;
struct TomlValue {
  using Array = std::vector<TomlValue>;
  using Table = std::vector<TomlEntry>;
  std::variant<bool, std::int64_t, double, std::string, Array, Table> value;
  TomlPlace at = {};
};
struct TomlEntry {
  std::string name;
  TomlValue value;
  TomlPlace at = {};  ///< place of the name
};

inline constexpr std::size_t kMostTomlBytes = 4 << 20;

/// Parses a text. `source` names the file in messages; without one they name no place.
/// Errors: kConfig, "SOURCE:LINE:COLUMN: ...".
TomlValue::Table parse_toml(std::string_view text, std::string_view source);
/// Returns "SOURCE:3:1: ", the beginning of messages.
std::string place_text(std::string_view source, const TomlPlace& place);

/// Returns TOML text on one line: `[0.9, 0.95]`, `"a \"quoted\" word"`.
std::string to_toml(const TomlValue& value);
/// Describes the value for messages: `3 (integer)`, `"abc" (string)`.
std::string describe(const TomlValue& value);

/// Returns "an integer from -2147483648 to 2147483647".
std::string integers_from(std::int64_t low, std::int64_t high);

}  // namespace tessera
