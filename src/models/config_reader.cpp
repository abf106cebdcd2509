#include "models/config_reader.h"

#include <cmath>
#include <utility>

#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::size_t kLongestShown = 120;
constexpr std::size_t kLongestList = 64;

}  // namespace

std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongestShown) text = text.substr(0, kLongestShown) + "...";
  return text;
}

ConfigReader::ConfigReader(const nlohmann::json& object, std::string path)
    : object_(object), path_(std::move(path)) {}

const nlohmann::json* ConfigReader::take(std::string_view key) {
  const auto found = object_.find(key);
  if (found == object_.end()) return nullptr;
  used_.emplace(key);
  return found->is_null() ? nullptr : &*found;
}

void ConfigReader::refuse(std::string_view key, std::string_view expected) const {
  const auto found = object_.find(key);
  const std::string value = found == object_.end() ? "nothing" : shown(*found);
  throw Error(ErrorKind::kConfig,
              concat("config.json ", path_, key, ": found ", value, ", expected ", expected));
}

std::optional<std::int64_t> ConfigReader::integer(std::string_view key, IntRange range) {
  const nlohmann::json* value = take(key);
  if (value == nullptr) return std::nullopt;
  const std::string expected = concat("an integer from ", range.min, " to ", range.max);
  if (!value->is_number_integer()) refuse(key, expected);
  // Unsigned values over 2^63 would wrap when read as signed.
  if (value->is_number_unsigned() && std::cmp_greater(value->get<std::uint64_t>(), range.max)) {
    refuse(key, expected);
  }
  const auto number = value->get<std::int64_t>();
  if (number < range.min || number > range.max) refuse(key, expected);
  return number;
}

std::optional<double> ConfigReader::number(std::string_view key, NumberRange range) {
  const nlohmann::json* value = take(key);
  if (value == nullptr) return std::nullopt;
  const std::string expected = concat("a number from ", range.min, " to ", range.max);
  if (!value->is_number()) refuse(key, expected);
  const auto number = value->get<double>();
  if (!std::isfinite(number) || number < range.min || number > range.max) refuse(key, expected);
  return number;
}

std::optional<bool> ConfigReader::boolean(std::string_view key) {
  const nlohmann::json* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::optional<std::string> ConfigReader::word(std::string_view key) {
  const nlohmann::json* value = take(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

std::vector<std::int64_t> ConfigReader::integers(std::string_view key, IntRange range) {
  const nlohmann::json* value = take(key);
  if (value == nullptr) return {};
  if (!value->is_array()) return {*integer(key, range)};
  std::vector<std::int64_t> numbers;
  if (value->size() > kLongestList) refuse(key, concat("at most ", kLongestList, " numbers"));
  for (const nlohmann::json& entry : *value) {
    nlohmann::json one = nlohmann::json::object();
    one[std::string(key)] = entry;
    const auto number = ConfigReader(one, path_).integer(key, range);
    if (!number) refuse(key, "numbers");
    numbers.push_back(*number);
  }
  return numbers;
}

void ConfigReader::expect(std::string_view key, const nlohmann::json& neutral,
                          std::string_view why) {
  const nlohmann::json* value = take(key);
  if (value != nullptr && *value != neutral) {
    refuse(key, concat(shown(neutral), " (", why, ")"));
  }
}

void ConfigReader::ignore(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) take(key);
}

std::vector<std::string> ConfigReader::unknown() const {
  std::vector<std::string> lines;
  for (const auto& [key, value] : object_.items()) {
    if (!used_.contains(key)) lines.push_back(concat(path_, shown(key), " = ", shown(value)));
  }
  return lines;
}

}  // namespace tessera::models
