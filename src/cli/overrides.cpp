#include "cli/overrides.h"

#include "tessera/error.h"
#include "train/config_keys.h"

namespace tessera::cli {
namespace {

// The name of `--name` or `--name=VALUE`, "" for another word.
std::string_view option_name(std::string_view word) {
  if (!word.starts_with("--")) return {};
  return word.substr(2, word.find('=') == std::string_view::npos ? word.npos : word.find('=') - 2);
}

bool is_override(std::string_view word) {
  const std::string_view name = option_name(word);
  if (name.find('.') != std::string_view::npos) return true;
  const train::ConfigKey* key = train::find_key(name);
  return key != nullptr && key->section.empty();
}

}  // namespace

SplitWords split_overrides(const std::vector<std::string>& words) {
  SplitWords split;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (!is_override(words[i])) {
      split.other.push_back(words[i]);
      continue;
    }
    const std::string name(option_name(words[i]));
    const std::size_t equals = words[i].find('=');
    if (equals != std::string::npos) {
      split.overrides.emplace_back(name, words[i].substr(equals + 1));
      continue;
    }
    TESSERA_CHECK(i + 1 < words.size() && !words[i + 1].starts_with("--"), ErrorKind::kUsage,
                  words[i], ": found no value, expected one, as in ", words[i], " VALUE");
    split.overrides.emplace_back(name, words[++i]);
  }
  return split;
}

void apply(const Overrides& overrides, train::Config& config) {
  for (const auto& [key, value] : overrides) train::apply_override(config, key, value);
}

}  // namespace tessera::cli
