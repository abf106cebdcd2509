// JSON from untrusted files: the whole text as a value, and typed reading of its parts.
//
// In addition to nlohmann/json's own checks a duplicate key is an error (two readers could each
// take another one) and nesting is limited, so that no later walk over the value can overflow the
// stack. The caller limits the size (read_text_file). Include this in .cpp files only: nlohmann is
// slow to compile. The safetensors header is not read here but streamed
// (io/safetensors_header.cpp): a value of the 100 MB that it may have would take gigabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/text/fields.h"
#include "tessera/error.h"

namespace tessera {

inline constexpr int kMaxJsonDepth = 64;

/// Parses the whole text as one JSON value. `where` names the file in messages. Errors: kFormat.
nlohmann::json parse_json(std::string_view text, std::string_view where,
                          int max_depth = kMaxJsonDepth);

/// Parses the whole text as one JSON object. Errors: kFormat.
nlohmann::json parse_json_object(std::string_view text, std::string_view where,
                                 int max_depth = kMaxJsonDepth);

/// Returns the message of a JSON error in one line: without the name of its class, and without the
/// place, which callers give as a byte.
std::string complaint_of(const nlohmann::json::exception& error);

/// Returns a value as one short line, in ASCII.
std::string json_line(const nlohmann::json& value);

/// The form of messages about the values of a file.
enum class JsonStyle {
  kData,  ///< kFormat "FILE: 'tensors': 'NAME': found a list, expected ...": names are the file's
  kKeys,  ///< kConfig "config.json rope_scaling.factor: found [1], expected ...": names are ours
};

/// A value and its place in the text, which becomes text for messages only. Errors: of each reader,
/// in the given style, for a value of another kind.
class JsonCursor {
 public:
  /// The cursor must not outlive the value and `name`, nor cursors that are made from it the cursor
  /// itself. In style kKeys names follow each other without separators.
  JsonCursor(const nlohmann::json& value, std::string_view name, JsonStyle style)
      : value_(value), name_(name), style_(style) {}
  JsonCursor(const nlohmann::json& value, std::string_view name, const JsonCursor& parent)
      : value_(value), name_(name), style_(parent.style_), parent_(&parent) {}

  const nlohmann::json& value() const { return value_; }
  std::string_view name() const { return name_; }

  /// Returns the member of an object that must have it.
  JsonCursor member(std::string_view key) const;
  std::optional<JsonCursor> find(std::string_view key) const;
  /// Returns the item of a list that has it.
  JsonCursor at(std::size_t index) const { return {value_[index], "an item", *this}; }

  std::int64_t integer() const;  ///< any integer of 64 bits
  std::int64_t integer(IntRange range) const;
  double number() const;
  double number(NumberRange range) const;
  bool boolean() const;
  const std::string& text() const;

  /// Returns the results of `read` for the items of a list.
  template <class Read>
  auto list(const Read& read) const {
    require(value_.is_array(), "a list");
    std::vector<std::decay_t<decltype(read(*this))>> items;
    for (const nlohmann::json& item : value_) items.push_back(read({item, "an item", *this}));
    return items;
  }
  template <class Read>
  auto by_name(const Read& read) const {
    require(value_.is_object(), "an object");
    std::map<std::string, decltype(read(*this)), std::less<>> items;
    for (const auto& [name, item] : value_.items()) items.emplace(name, read({item, name, *this}));
    return items;
  }

  void require(bool condition, std::string_view expected) const {
    if (!condition) refuse(expected);
  }
  [[noreturn]] void refuse(std::string_view expected) const;
  std::string where() const;
  std::string shown() const;

 private:
  ErrorKind kind() const {
    return style_ == JsonStyle::kKeys ? ErrorKind::kConfig : ErrorKind::kFormat;
  }

  const nlohmann::json& value_;
  std::string_view name_;
  JsonStyle style_;
  const JsonCursor* parent_ = nullptr;
};

}  // namespace tessera
