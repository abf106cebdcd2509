// Environment variables: the only place that reads them.
//
// Everything that depends on one takes a value or a map of them, so that it can be tested without
// setting any. Writing is not offered: a child's environment is handed to execve.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace tessera::base {

using Environment = std::map<std::string, std::string, std::less<>>;

/// All variables, as they are now.
Environment environment();

/// One variable; none when it is not set (an empty one is set).
std::optional<std::string> environment_variable(const std::string& name);

/// Whether a switch is on: set to 1, true, yes or on, case ignored.
/// Errors: kUsage for any value that is neither that nor 0, false, no, off or empty.
bool environment_switch(const std::string& name);

}  // namespace tessera::base
