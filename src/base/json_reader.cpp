#include "base/json_reader.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// None for anything but an integer of the range, also for one that 64 bits do not hold.
std::optional<std::int64_t> integer_of(const nlohmann::json& value, IntRange range) {
  if (!value.is_number_integer()) return std::nullopt;
  // Unsigned values over 2^63 would wrap when read as signed.
  if (value.is_number_unsigned() && std::cmp_greater(value.get<std::uint64_t>(), range.max)) {
    return std::nullopt;
  }
  const auto number = value.get<std::int64_t>();
  if (number < range.min || number > range.max) return std::nullopt;
  return number;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view where, int max_depth) {
  using nlohmann::json;
  std::vector<std::set<std::string>> open_objects;  // the keys seen in each
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        TESSERA_CHECK(depth < max_depth, ErrorKind::kFormat, where,
                      ": found JSON nested deeper than ", max_depth, " levels");
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        break;
      case json::parse_event_t::object_end:
        open_objects.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        TESSERA_CHECK(open_objects.back().insert(key).second, ErrorKind::kFormat, where,
                      ": found the key ", printable(key), " twice in one object");
        break;
      }
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    throw Error(ErrorKind::kFormat,
                concat(where, ": malformed JSON at byte ", error.byte, ": ", complaint_of(error)));
  } catch (const json::exception& error) {
    throw Error(ErrorKind::kFormat, concat(where, ": malformed JSON: ", complaint_of(error)));
  }
}

nlohmann::json parse_json_object(std::string_view text, std::string_view where, int max_depth) {
  nlohmann::json value = parse_json(text, where, max_depth);
  TESSERA_CHECK(value.is_object(), ErrorKind::kFormat, where, ": found a JSON ", value.type_name(),
                ", expected an object");
  return value;
}

std::string complaint_of(const nlohmann::json::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: what is wrong"
  std::string_view text = error.what();
  if (text.starts_with('[')) text.remove_prefix(std::min(text.find("] ") + 2, text.size()));
  if (text.starts_with("parse error at ")) {
    text.remove_prefix(std::min(text.find(": ") + 2, text.size()));
  }
  std::string shown = printable(text, 200);
  return shown.substr(1, shown.size() - 2);  // it is a sentence of its own, and has quotes inside
}

std::string json_line(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 120;
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

JsonCursor JsonCursor::member(const char* key) const {
  require(value_.is_object(), "an object");
  const auto found = value_.find(key);
  TESSERA_CHECK(found != value_.end(), kind(), where(), ": found no \"", key, "\", expected one");
  return {*found, key, *this};
}

std::optional<JsonCursor> JsonCursor::find(const char* key) const {
  return value_.contains(key) ? std::optional(member(key)) : std::nullopt;
}

std::int64_t JsonCursor::integer() const {
  using Limits = std::numeric_limits<std::int64_t>;
  const auto number = integer_of(value_, {Limits::min(), Limits::max()});
  require(number.has_value(), "an integer below 2^63");
  return *number;
}

std::int64_t JsonCursor::integer(IntRange range) const {
  const auto number = integer_of(value_, range);
  if (!number) refuse(concat("an integer from ", range.min, " to ", range.max));
  return *number;
}

double JsonCursor::number() const {
  require(value_.is_number(), "a number");
  return value_.get<double>();
}

double JsonCursor::number(NumberRange range) const {
  const double number = value_.is_number() ? value_.get<double>() : std::nan("");
  if (!std::isfinite(number) || number < range.min || number > range.max) {
    refuse(concat("a number from ", range.min, " to ", range.max));
  }
  return number;
}

bool JsonCursor::boolean() const {
  require(value_.is_boolean(), "true or false");
  return value_.get<bool>();
}

const std::string& JsonCursor::text() const {
  require(value_.is_string(), "a string");
  return value_.get_ref<const std::string&>();
}

void JsonCursor::refuse(std::string_view expected) const {
  throw Error(kind(), concat(where(), ": found ", shown(), ", expected ", expected));
}

std::string JsonCursor::where() const {
  if (parent_ == nullptr) return std::string(name_);
  if (style_ == JsonStyle::kKeys) return concat(parent_->where(), name_);
  return concat(parent_->where(), ": ", printable(name_));
}

std::string JsonCursor::shown() const {
  if (style_ == JsonStyle::kKeys) return json_line(value_);
  if (value_.is_structured()) return value_.is_array() ? "a list" : "an object";
  return printable(value_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), 60);
}

}  // namespace tessera
