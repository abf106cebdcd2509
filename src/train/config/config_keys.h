// The key table: every key of the configuration once, with type, unit, range, default and help.
//
// It knows no TOML: values come and go as ConfigValue, which the reader (config.cpp), the
// dump and the help text share. A new key is one line in config_keys.cpp. Next: config_keys.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/toml_reader.h"
#include "train/config/config.h"

namespace tessera::train {

using ConfigValue = TomlValue;
using ConfigEntry = TomlEntry;

struct ConfigKey {
  std::string section;  ///< empty = at top level
  std::string name;
  std::string type;  ///< "integer", "list of strings", "adamw | sgd", ...
  std::string unit;  ///< "steps", "seconds", "" where there is none
  std::string default_text;
  std::string help;
  /// Errors: kConfig, "training.steps: found ..., expected ...".
  std::function<void(Config&, const ConfigValue&)> set;
  /// None for a key without a value (it has no default and was not set).
  std::function<std::optional<ConfigValue>(const Config&)> get;

  std::string full_name() const { return section.empty() ? name : section + "." + name; }
};

/// In the order of the documentation; keys of a section are adjacent, the top-level key comes
/// first.
const std::vector<ConfigKey>& config_keys();

/// None when there is no such key.
const ConfigKey* find_key(std::string_view full_name);
bool is_section(std::string_view name);
/// Their names, in the order of the keys.
std::vector<std::string> config_sections();

/// Every key that `is_shown` with type, unit and default: --help-keys.
std::string config_help(const std::function<bool(const ConfigKey&)>& is_shown = {});

}  // namespace tessera::train
