// ConfigReader: the keys of one JSON object, each taken at most once, with what is left over known.
//
// It knows types and ranges, not models. Private to model_spec.cpp and its tests. Next:
// model_spec.cpp.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

struct IntRange {
  std::int64_t min = 1;
  std::int64_t max = std::int64_t{1} << 31;
};

struct NumberRange {
  double min = 0.0;  ///< may be reached
  double max = std::numeric_limits<double>::max();
};

class ConfigReader {
 public:
  /// `object` must outlive the reader; `path` goes in front of keys in messages ("rope_scaling.").
  explicit ConfigReader(const nlohmann::json& object, std::string path = "");

  /// Whether the key is there, null included.
  bool contains(std::string_view key) const { return object_.find(key) != object_.end(); }

  /// Whether the key is there and null; marked as used then.
  bool is_null(std::string_view key) { return contains(key) && take(key) == nullptr; }

  /// The value of a key, marked as used; null counts as absent.
  const nlohmann::json* take(std::string_view key);

  std::optional<std::int64_t> integer(std::string_view key, IntRange range);
  std::optional<double> number(std::string_view key, NumberRange range);
  std::optional<bool> boolean(std::string_view key);
  std::optional<std::string> word(std::string_view key);
  /// A number, or a list of at most 64.
  std::vector<std::int64_t> integers(std::string_view key, IntRange range);

  /// Errors: kConfig unless the key is absent, null or `neutral`; `why` says what else would mean.
  void expect(std::string_view key, const nlohmann::json& neutral, std::string_view why);
  /// Keys that change nothing here.
  void ignore(std::initializer_list<std::string_view> keys);

  /// Keys that nobody took, as "key = value".
  std::vector<std::string> unknown() const;

  /// Errors: kConfig "config.json KEY: found VALUE, expected ...".
  [[noreturn]] void refuse(std::string_view key, std::string_view expected) const;

 private:
  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string, std::less<>> used_;
};

/// A JSON value as one short printable line.
std::string shown(const nlohmann::json& value);

}  // namespace tessera::models
