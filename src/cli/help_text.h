// Texts of --help, each within a screen: the program's lists its verbs, a verb's the options of
// that verb. The keys of the configuration, which are hundreds of lines, are printed by
// --help-keys.
#pragma once

#include <CLI/App.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// Prints lines of at most 80 columns. Set it before verbs are added, which inherit it.
std::shared_ptr<::CLI::FormatterBase> screen_formatter();

/// The last lines of --help of a verb that takes keys: they say how keys are listed.
std::string where_keys_are();

/// The text that --help-keys [SECTION] among `words` asks for, "" without that option. Errors:
/// kUsage for a section that does not exist, and for a verb that takes no key.
std::string keys_asked_for(const std::vector<std::string>& words);

/// Whether the verb takes the key `full_name`, where it takes a configuration at all.
bool takes_key(std::string_view verb, std::string_view full_name);

}  // namespace tessera::cli
