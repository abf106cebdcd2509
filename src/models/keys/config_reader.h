// ConfigReader: the keys of one JSON object, each taken at most once; it lists the keys left over.
//
// The cursor reads values by type (base/text/json_reader.h); this class knows names, not models.
// Next: ../model_spec.cpp.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/json_reader.h"

namespace tessera::models {

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

  const std::string& path() const { return path_; }
  /// Looks a key up without marking it as used; null where it is absent.
  const nlohmann::json* find(std::string_view key) const;
  /// The names of the keys that were not used.
  std::vector<std::string> untaken() const;
  /// The unused keys as "key = value".
  std::vector<std::string> unknown() const;

  /// Errors: kConfig "config.json KEY: found VALUE, expected ...".
  [[noreturn]] void refuse(std::string_view key, std::string_view expected) const;

 private:
  /// Returns what `read` makes of a cursor at the key's value.
  template <class Read>
  auto taken(std::string_view key, const Read& read) {
    const nlohmann::json* value = take(key);
    const JsonCursor file(object_, "config.json ", JsonStyle::kKeys);
    const JsonCursor object(object_, path_, file);
    using Result = std::optional<decltype(read(object))>;
    return value == nullptr ? Result() : Result(read(JsonCursor(*value, key, object)));
  }

  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string, std::less<>> used_;
};

/// Errors: kConfig naming `key` of config.json, which may say of which layer.
void check_head_dim(std::string_view key, std::int64_t head_dim,
                    std::string_view why = "as rope turns pairs");
void check_key_value_heads(std::string_view key, std::int64_t found, std::int64_t attention_heads);

/// As messages show it.
inline std::string shown(const nlohmann::json& value) { return json_line(value); }

}  // namespace tessera::models
