// Reading and writing TOML, and the key table as text: --help, the nearest name of a misspelt key.
// The only file that knows toml++, which reads; what is written is spelt here.
#include "train/config/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "base/text/wrapped.h"
#include "tessera/error.h"
#include "train/config/config_codec.h"
#include "train/config/config_keys.h"
#include "train/config/config_names.h"

namespace tessera::train {
namespace {

constexpr std::size_t kMaxTextBytes = 4 << 20;
constexpr std::size_t kMaxReasonBytes = 400;
constexpr int kMaxDepth = 32;

// The parser builds and destroys nested tables by recursion, one level for every component of a
// dotted key, without a bound of its own. Values never need more than three levels here, so that
// deep texts are refused before it sees them. Strings are skipped by TOML's rules; a text that
// breaks these rules is refused by the parser where it breaks them.
class DepthScan {
 public:
  explicit DepthScan(std::string_view text) : text_(text) {}

  void check() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (c == '"' || c == '\'') {
        skip_string(c);
      } else {
        count(c);
        ++at_;
      }
    }
  }

 private:
  void count(char c) {
    if (c == '\n') ++line_;
    if (c == '.') ++dots_;
    if (c == '[' || c == '{') ++brackets_;
    if ((c == ']' || c == '}') && brackets_ > 0) --brackets_;
    if (c == '=' || c == ',' || c == '{' || c == '}' || c == '\n') dots_ = 0;
    TESSERA_CHECK(dots_ <= kMaxDepth && brackets_ <= kMaxDepth, ErrorKind::kConfig, "line ", line_,
                  ": found more than ", kMaxDepth, " nested keys or values");
  }

  void skip_string(char quote) {
    const std::string triple(3, quote);
    const bool multi_line = text_.substr(at_, 3) == triple;
    at_ += multi_line ? 3 : 1;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n' && !multi_line) return;  // unterminated: an error of the parser's
      if (c == '\n') ++line_;
      if (c == '\\' && quote == '"') {
        at_ += 1;  // the next one is part of an escape; a newline is counted above on its own
        if (at_ < text_.size() && text_[at_] != '\n') ++at_;
        continue;
      }
      if (multi_line ? text_.substr(at_, 3) == triple : c == quote) {
        at_ += multi_line ? 3 : 1;
        return;
      }
      ++at_;
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
  int dots_ = 0;
  int brackets_ = 0;
};

std::string where(std::string_view source, const toml::source_region& region) {
  return concat(source, ":", region.begin.line, ":", region.begin.column, ": ");
}

std::string_view trimmed(std::string_view text) {
  const auto begin = std::min(text.find_first_not_of(" \t\r"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// The parser names no key. What stands before "=" in the line is one, below the last [section]; ""
// where a value goes over several lines.
std::string key_in_line(std::string_view text, std::size_t line) {
  std::string section;
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view words = trimmed(text.substr(0, end));
    if (number == line) {
      const auto equals = words.find('=');
      return equals == words.npos ? "" : concat(section, trimmed(words.substr(0, equals)));
    }
    if (words.starts_with('[') && words.find(']') != words.npos) {
      section = concat(words.substr(1, words.find(']') - 1), ".");
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return "";
}

// In words of ours where the parser's lack what would do. `said`: its own.
std::string reason_of(const toml::parse_error& error, std::string_view text,
                      const std::string& said) {
  const auto says = [&](std::string_view words) {
    return error.description().find(words) != std::string_view::npos;
  };
  // The second where it reads numbers by a stream.
  if (!says("not representable in 64 bits") && !says("could not be interpreted")) return said;
  const std::string key = key_in_line(text, error.source().begin.line);
  using Integers = std::numeric_limits<std::int64_t>;
  using Numbers = std::numeric_limits<double>;
  return concat(find_key(key) == nullptr ? "" : key + ": ",
                "found a number that 64 bits do not hold, expected ",
                says("integer")
                    ? integers_from(Integers::min(), Integers::max())
                    : concat("0 or a number from ", Numbers::min(), " to ", Numbers::max()),
                " (", said, ")");
}

// A text of the command line has no source, and its messages no place.
toml::table parse_text(std::string_view text, std::string_view source) {
  TESSERA_CHECK(text.size() <= kMaxTextBytes, ErrorKind::kConfig, source, ": found ", text.size(),
                " bytes, expected at most ", kMaxTextBytes);
  try {
    DepthScan(text).check();
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    const std::string place = source.empty() ? "" : where(source, error.source());
    const std::string said = printable(error.description(), kMaxReasonBytes);  // quotes the text
    throw Error(ErrorKind::kConfig,
                place + reason_of(error, text, said.substr(1, said.size() - 2)));
  } catch (const Error& error) {
    throw Error(error.kind(), concat(source, source.empty() ? "" : ": ", error.what()));
  }
}

// Depth is bounded by DepthScan.
ConfigValue convert(const toml::node& node) {
  if (const auto* b = node.as_boolean()) return {b->get()};
  if (const auto* i = node.as_integer()) return {i->get()};
  if (const auto* f = node.as_floating_point()) return {f->get()};
  if (const auto* s = node.as_string()) return {s->get()};
  if (const auto* array = node.as_array()) {
    ConfigValue::Array items;
    for (const toml::node& item : *array) items.push_back(convert(item));
    return {std::move(items)};
  }
  if (const auto* table = node.as_table()) {
    ConfigValue::Table entries;
    for (const auto& [key, item] : *table)
      entries.push_back({std::string(key.str()), convert(item)});
    return {std::move(entries)};
  }
  throw Error(ErrorKind::kConfig, "found a date or time, expected no such value");
}

void set_key(Config& config, const ConfigKey& key, const toml::node& node,
             std::string_view source) {
  try {
    key.set(config, convert(node));
  } catch (const Error& error) {
    throw Error(error.kind(), where(source, node.source()) + error.what());
  }
}

/// Whether the key is one that was removed and has its default: RUN/config.toml of an earlier run
/// names it though the run had not set it.
bool is_gone_and_unset(std::string_view key, const toml::node& node) {
  return key == "compile.offload_folder" && node.as_string() != nullptr &&
         node.as_string()->get().empty();
}

void read_section(Config& config, const std::string& section, const toml::table& table,
                  std::string_view source) {
  for (const auto& [name, node] : table) {
    const std::string full = concat(section, ".", name.str());
    if (is_gone_and_unset(full, node)) continue;
    const ConfigKey* key = find_key(full);
    TESSERA_CHECK(key != nullptr, ErrorKind::kConfig, where(source, name.source()), "unknown key ",
                  printable(full), advice_on_key(full, KeysIn::kFile));
    set_key(config, *key, node, source);
  }
}

void read_top_level(Config& config, const toml::key& name, const toml::node& node,
                    std::string_view source) {
  const std::string word(name.str());
  if (is_section(word)) {
    const toml::table* table = node.as_table();
    TESSERA_CHECK(table != nullptr, ErrorKind::kConfig, where(source, node.source()), word,
                  ": found ", node.is_array() ? "an array" : "a value", ", expected a section [",
                  word, "]");
    return read_section(config, word, *table, source);
  }
  if (const ConfigKey* key = find_key(word); key != nullptr && key->section.empty()) {
    return set_key(config, *key, node, source);
  }
  TESSERA_CHECK(!node.is_table(), ErrorKind::kConfig, where(source, name.source()),
                "unknown section ", printable(word), advice_on_section(word));
  throw Error(ErrorKind::kConfig, concat(where(source, name.source()), "unknown key ",
                                         printable(word), advice_on_key(word, KeysIn::kFile)));
}

// What a VALUE of the command line is when read as TOML; none when it is a bare word.
std::optional<ConfigValue> toml_value(std::string_view key, std::string_view value) {
  const std::size_t first = value.find_first_not_of(" \t");
  const bool meant_as_toml =
      first != std::string_view::npos && std::string_view("[{\"'").find(value[first]) != value.npos;
  try {
    const toml::table table = parse_text(concat("value = ", value), "");
    const toml::node* node = table.get("value");
    if (node != nullptr && table.size() == 1 && value.find('\n') == value.npos)
      return convert(*node);
    return std::nullopt;
  } catch (const Error& error) {
    if (!meant_as_toml) return std::nullopt;
    throw Error(ErrorKind::kConfig, concat("--", key, ": found ", printable(value),
                                           ", which is not TOML (", error.what(), ")"));
  }
}

ConfigValue bare_word(std::string_view key, std::string_view value) {
  ConfigValue word{std::string(value)};
  try {
    parse_text(concat("value = ", to_toml(word)), "");
  } catch (const Error&) {
    throw Error(ErrorKind::kUsage, concat("--", key, ": found a value that is not UTF-8"));
  }
  return word;
}

}  // namespace

Config parse_config(std::string_view text, std::string_view source) {
  const toml::table table = parse_text(text, source);
  Config config;
  for (const auto& [name, node] : table) read_top_level(config, name, node, source);
  return config;
}

Config load_config(const std::string& path) {
  return parse_config(read_text_file(path, kMaxTextBytes), path);
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
