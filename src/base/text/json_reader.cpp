#include "base/text/json_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Makes a value from the events of nlohmann's parser. Its parser with a callback would do, but
/// whenever an object or a list ends it walks through all of its contents: that takes hours for a
/// file that is made for it, and a minute for the many tensors of one rank.
class ValueBuilder {
 public:
  using Json = nlohmann::json;

  ValueBuilder(std::string_view where, int max_depth)
      : where_(where), max_depth_(static_cast<std::size_t>(max_depth)) {}

  Json take() { return std::move(root_); }

  // The parser's events; it sets their names.
  bool null() { return put(nullptr) != nullptr; }
  bool boolean(bool value) { return put(value) != nullptr; }
  bool number_integer(std::int64_t value) { return put(value) != nullptr; }
  bool number_unsigned(std::uint64_t value) { return put(value) != nullptr; }
  bool number_float(double value, const std::string&) { return put(value) != nullptr; }
  bool string(std::string& value) { return put(std::move(value)) != nullptr; }
  bool binary(Json::binary_t&) { return false; }  // not in JSON text
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    const auto [at, added] = open_.back()->emplace(std::move(name), nullptr);
    TESSERA_CHECK(added, ErrorKind::kFormat, where_, ": found the key ", printable(at.key()),
                  " twice in one object");
    awaited_ = &*at;
    key_ = &at.key();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) {
    const auto* const at = dynamic_cast<const Json::parse_error*>(&error);
    // Numbers that a double cannot hold: an error of another kind, which has no byte of its own.
    const bool is_of_key = at == nullptr && !open_.empty() && open_.back()->is_object();
    throw Error(
        ErrorKind::kFormat,
        concat(where_, ": malformed JSON at byte ", at ? at->byte : position,
               is_of_key ? concat(", key ", printable(*key_)) : "", ": ", complaint_of(error)));
  }

 private:
  Json* put(Json value) {
    if (!open_.empty() && open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *awaited_ = std::move(value);
    return awaited_;
  }
  bool open(Json empty) {
    TESSERA_CHECK(open_.size() < max_depth_, ErrorKind::kFormat, where_,
                  ": found JSON nested deeper than ", max_depth_, " levels");
    open_.push_back(put(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view where_;
  std::size_t max_depth_;
  Json root_;
  const std::string* key_ = nullptr;  // the last one
  Json* awaited_ = &root_;            // where the next value goes, unless it is an item of a list
  std::vector<Json*> open_;           // open lists and objects; their parents do not move meanwhile
};

/// Returns the integer; none for other values, and for integers outside the range or 64 bits.
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
  ValueBuilder builder(where, max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
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
  return shown.substr(1, shown.size() - 2);  // without quotes: it is a sentence that contains some
}

std::string json_line(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 120;
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

JsonCursor JsonCursor::member(std::string_view key) const {
  require(value_.is_object(), "an object");
  const auto found = value_.find(key);
  TESSERA_CHECK(found != value_.end(), kind(), where(), ": found no \"", key, "\", expected one");
  return {*found, key, *this};
}

std::optional<JsonCursor> JsonCursor::find(std::string_view key) const {
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
