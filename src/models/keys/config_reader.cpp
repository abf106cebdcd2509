#include "models/keys/config_reader.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::size_t kLongestList = 64;

}  // namespace

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
  return taken(key, [&](const JsonCursor& value) { return value.integer(range); });
}

std::optional<double> ConfigReader::number(std::string_view key, NumberRange range) {
  return taken(key, [&](const JsonCursor& value) { return value.number(range); });
}

std::optional<bool> ConfigReader::boolean(std::string_view key) {
  return taken(key, [](const JsonCursor& value) { return value.boolean(); });
}

std::optional<std::string> ConfigReader::word(std::string_view key) {
  return taken(key, [](const JsonCursor& value) { return std::string(value.text()); });
}

std::vector<std::int64_t> ConfigReader::integers(std::string_view key, IntRange range) {
  const auto read = [&](const JsonCursor& value) -> std::vector<std::int64_t> {
    const nlohmann::json& list = value.value();
    if (!list.is_array()) return {value.integer(range)};
    if (list.size() > kLongestList) value.refuse(concat("at most ", kLongestList, " numbers"));
    std::vector<std::int64_t> numbers;
    for (const nlohmann::json& entry : list) {
      value.require(!entry.is_null(), "numbers");
      numbers.push_back(JsonCursor(entry, "", value).integer(range));
    }
    return numbers;
  };
  return taken(key, read).value_or(std::vector<std::int64_t>());
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

const nlohmann::json* ConfigReader::find(std::string_view key) const {
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

std::vector<std::string> ConfigReader::untaken() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : object_.items()) {
    if (!used_.contains(key)) names.push_back(key);
  }
  return names;
}

std::vector<std::string> ConfigReader::unknown() const {
  std::vector<std::string> lines;
  for (const std::string& key : untaken()) {
    lines.push_back(concat(path_, shown(key), " = ", shown(*find(key))));
  }
  return lines;
}

void check_head_dim(std::string_view key, std::int64_t head_dim, std::string_view why) {
  TESSERA_CHECK(head_dim % 2 == 0, ErrorKind::kConfig, "config.json ", key, ": found ", head_dim,
                ", expected an even number, ", why);
}

void check_key_value_heads(std::string_view key, std::int64_t found, std::int64_t attention_heads) {
  TESSERA_CHECK(attention_heads % found == 0, ErrorKind::kConfig, "config.json ", key, ": found ",
                found, ", expected a divisor of num_attention_heads = ", attention_heads);
}

}  // namespace tessera::models
