// The key table as text: TOML values, --help, and the nearest name of a misspelt key.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/wildcard.h"
#include "train/config/config_codec.h"
#include "train/config/config_keys.h"

namespace tessera::train {
namespace {

// Not toml++'s writer: it spells 0.1 as 0.10000000000000001, sorts keys and cuts strings into
// lines. Checkpoints hold the hash of this text.
std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      constexpr std::string_view kHex = "0123456789ABCDEF";
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";  // TOML would read an integer
  return text;
}

std::string joined(const ConfigValue::Array& items) {
  std::string out;
  for (const ConfigValue& item : items) out += (out.empty() ? "" : ", ") + to_toml(item);
  return "[" + out + "]";
}

std::string joined(const ConfigValue::Table& entries) {
  std::string out;
  for (const auto& [name, item] : entries) {
    out += (out.empty() ? "" : ", ") + name + " = " + to_toml(item);
  }
  return "{" + out + "}";
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Long words are cut: no name of ours is that long.
std::size_t slips(std::string_view word, std::string_view name) {
  constexpr std::size_t kLongest = 80;
  return edit_distance(word.substr(0, kLongest), name.substr(0, kLongest), Typed::kWord);
}

std::string_view after_dot(std::string_view name) {
  const std::size_t dot = name.find('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

void append_wrapped(std::string& out, std::string_view text, std::size_t indent) {
  constexpr std::size_t kColumns = 100;
  std::size_t column = indent;
  out.append(indent, ' ');
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, space);
    if (column > indent && column + 1 + word.size() > kColumns) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  out += '\n';
}

}  // namespace

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](char x, char y) { return lower(x) == lower(y); });
}

std::string to_toml(const ConfigValue& value) {
  struct Writer {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(std::int64_t i) const { return std::to_string(i); }
    std::string operator()(double d) const { return number_text(d); }
    std::string operator()(const std::string& s) const { return toml_string(s); }
    std::string operator()(const ConfigValue::Array& a) const { return joined(a); }
    std::string operator()(const ConfigValue::Table& t) const { return joined(t); }
  };
  return std::visit(Writer{}, value.value);
}

std::string describe(const ConfigValue& value) {
  static constexpr std::array<std::string_view, 6> kTypes{"boolean", "integer", "number",
                                                          "string",  "array",   "table"};
  constexpr std::size_t kLongest = 60;
  std::string text = to_toml(value);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return concat(text, " (", kTypes[value.value.index()], ")");
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

std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t fewest = std::string::npos;
  for (const std::string& candidate : candidates) {
    const std::size_t found = slips(word, candidate);
    if (found < fewest) {
      best = candidate;
      fewest = found;
    }
  }
  return best;
}

std::string nearest_key(std::string_view full_name) {
  std::string best;
  std::size_t fewest = std::string::npos;
  for (const ConfigKey& key : config_keys()) {
    const std::string candidate = key.full_name();
    // A right key in a wrong section is one mistake, however different the sections' names.
    const std::size_t found =
        std::min(slips(full_name, candidate), slips(after_dot(full_name), key.name) + 1);
    if (found < fewest) {
      best = candidate;
      fewest = found;
    }
  }
  return best;
}

std::string nearest_section(std::string_view name) {
  std::vector<std::string> sections;
  for (const ConfigKey& key : config_keys()) sections.push_back(key.section);
  std::erase(sections, "");
  return nearest_name(name, sections);
}

std::string config_help() {
  std::string out = "Configuration keys (TOML file, or --section.key VALUE):\n";
  std::string section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      section = key.section;
      out += concat("\n[", section, "]\n");
    }
    out += concat("  ", key.full_name(), "  ", key.type);
    if (!key.unit.empty()) out += concat(" (", key.unit, ")");
    const bool required = key.default_text.starts_with("required");
    out += concat(required ? ", " : ", default ", key.default_text, "\n");
    append_wrapped(out, key.help, 6);
  }
  return out;
}

}  // namespace tessera::train
