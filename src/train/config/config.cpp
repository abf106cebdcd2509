// The configuration out of TOML and back, and the key table as text: --help-keys.
#include "train/config/config.h"

#include <algorithm>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "base/text/toml_reader.h"
#include "base/text/wrapped.h"
#include "tessera/error.h"
#include "train/config/config_codec.h"
#include "train/config/config_keys.h"
#include "train/config/config_names.h"

namespace tessera::train {
namespace {

void set_key(Config& config, const ConfigKey& key, const ConfigValue& value,
             std::string_view source) {
  try {
    key.set(config, value);
  } catch (const Error& error) {
    throw Error(error.kind(), place_text(source, value.at) + error.what());
  }
}

/// Whether the key is one that was removed and has its default: RUN/config.toml of an earlier run
/// names it though the run had not set it.
bool is_gone_and_unset(std::string_view key, const ConfigValue& value) {
  const auto* text = std::get_if<std::string>(&value.value);
  return key == "compile.offload_folder" && text != nullptr && text->empty();
}

void read_section(Config& config, const std::string& section, const ConfigValue::Table& table,
                  std::string_view source) {
  for (const auto& [name, value, at] : table) {
    const std::string full = concat(section, ".", name);
    if (is_gone_and_unset(full, value)) continue;
    const ConfigKey* key = find_key(full);
    TESSERA_CHECK(key != nullptr, ErrorKind::kConfig, place_text(source, at), "unknown key ",
                  printable(full), advice_on_key(full, KeysIn::kFile));
    set_key(config, *key, value, source);
  }
}

void read_top_level(Config& config, const ConfigEntry& entry, std::string_view source) {
  const std::string& word = entry.name;
  const auto* table = std::get_if<ConfigValue::Table>(&entry.value.value);
  if (is_section(word)) {
    const bool is_array = std::holds_alternative<ConfigValue::Array>(entry.value.value);
    TESSERA_CHECK(table != nullptr, ErrorKind::kConfig, place_text(source, entry.value.at), word,
                  ": found ", is_array ? "an array" : "a value", ", expected a section [", word,
                  "]");
    return read_section(config, word, *table, source);
  }
  if (const ConfigKey* key = find_key(word); key != nullptr && key->section.empty()) {
    return set_key(config, *key, entry.value, source);
  }
  TESSERA_CHECK(table == nullptr, ErrorKind::kConfig, place_text(source, entry.at),
                "unknown section ", printable(word), advice_on_section(word));
  throw Error(ErrorKind::kConfig, concat(place_text(source, entry.at), "unknown key ",
                                         printable(word), advice_on_key(word, KeysIn::kFile)));
}

// Reads a VALUE of the command line as TOML; none when it is a bare word.
std::optional<ConfigValue> toml_value(std::string_view key, std::string_view value) {
  const std::size_t first = value.find_first_not_of(" \t");
  const bool meant_as_toml =
      first != std::string_view::npos && std::string_view("[{\"'").find(value[first]) != value.npos;
  try {
    auto table = parse_toml(concat("value = ", value), "");
    const bool is_one = table.size() == 1 && table.front().name == "value";
    if (!is_one || value.find('\n') != value.npos) return std::nullopt;
    return std::move(table.front().value);
  } catch (const Error& error) {
    if (!meant_as_toml) return std::nullopt;
    throw Error(ErrorKind::kConfig, concat("--", key, ": found ", printable(value),
                                           ", which is not TOML (", error.what(), ")"));
  }
}

ConfigValue bare_word(std::string_view key, std::string_view value) {
  ConfigValue word{std::string(value)};
  try {
    parse_toml(concat("value = ", to_toml(word)), "");
  } catch (const Error&) {
    throw Error(ErrorKind::kUsage, concat("--", key, ": found a value that is not UTF-8"));
  }
  return word;
}

}  // namespace

Config parse_config(std::string_view text, std::string_view source) {
  Config config;
  for (const ConfigEntry& entry : parse_toml(text, source)) read_top_level(config, entry, source);
  return config;
}

Config load_config(const std::string& path) {
  return parse_config(read_text_file(path, kMostTomlBytes), path);
}

void apply_override(Config& config, std::string_view name, std::string_view value) {
  const ConfigKey* key = find_key(name);
  TESSERA_CHECK(key != nullptr, ErrorKind::kUsage, "unknown key ", printable(concat("--", name)),
                advice_on_key(name, KeysIn::kCommandLine));
  const std::optional<ConfigValue> parsed = toml_value(name, value);
  const ConfigValue word = bare_word(name, value);
  const bool scalar = parsed && !std::holds_alternative<std::string>(parsed->value) &&
                      !std::holds_alternative<ConfigValue::Array>(parsed->value) &&
                      !std::holds_alternative<ConfigValue::Table>(parsed->value);
  try {
    key->set(config, parsed ? *parsed : word);
  } catch (const Error& error) {
    const Error found(error.kind(), concat("--", error.what()));
    if (!scalar) throw found;
    try {  // a folder may be called 2026
      key->set(config, word);
    } catch (const Error&) {
      throw found;
    }
  }
}

std::string to_toml(const Config& config) {
  std::string out;
  std::string section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      section = key.section;
      out += concat("\n[", section, "]\n");
    }
    const std::optional<ConfigValue> value = key.get(config);
    if (!value) continue;
    out += concat(key.name, " = ", to_toml(*value), "\n");
  }
  return out;
}

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](char x, char y) { return lower(x) == lower(y); });
}

const ConfigKey* find_key(std::string_view full_name) {
  for (const ConfigKey& key : config_keys()) {
    if (key.full_name() == full_name) return &key;
  }
  return nullptr;
}

bool is_section(std::string_view name) {
  return !name.empty() && std::ranges::any_of(config_keys(), [name](const ConfigKey& key) {
    return key.section == name;
  });
}

std::vector<std::string> config_sections() {
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    if (!key.section.empty() && (names.empty() || names.back() != key.section)) {
      names.push_back(key.section);
    }
  }
  return names;
}

std::string config_help(const std::function<bool(const ConfigKey&)>& is_shown) {
  constexpr std::size_t kColumns = 100;
  std::string out = "Configuration keys (TOML file, or --section.key VALUE):\n";
  std::string section;
  for (const ConfigKey& key : config_keys()) {
    if (is_shown && !is_shown(key)) continue;
    if (key.section != section) {
      section = key.section;
      out += concat("\n[", section, "]\n");
    }
    out += concat("  ", key.full_name(), "  ", key.type);
    if (!key.unit.empty()) out += concat(" (", key.unit, ")");
    const bool required = key.default_text.starts_with("required");
    out += concat(required ? ", " : ", default ", key.default_text, "\n");
    out += wrapped(key.help, 6, kColumns);
  }
  return out;
}

}  // namespace tessera::train
