// What --help prints: of the program its verbs, of a verb its own options, each within a screen. The
// keys of the configuration, which are hundreds of lines, are --help-keys'.
#pragma once

#include <CLI/App.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// Lines of at most 80 columns. To be set before verbs are added, which take it over.
std::shared_ptr<::CLI::FormatterBase> screen_formatter();

/// The last lines of --help of a verb that takes keys: where they are.
std::string where_keys_are();

/// --help-keys [SECTION] among `words`: the text that it asks for. "" where it is not there. Errors:
/// kUsage for a section that does not exist, and for a verb that takes no key.
std::string keys_asked_for(const std::vector<std::string>& words);

/// Whether the verb takes the key `full_name`, where it takes a configuration at all.
bool takes_key(std::string_view verb, std::string_view full_name);

}  // namespace tessera::cli
