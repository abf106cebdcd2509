// Environment variables: the only place that reads and writes them.
//
// Everything that depends on one takes a value or a map of them, so that it can be tested without
// setting any. A child's environment is handed to execve; written is only what a library in this
// process reads, and reads nowhere else.
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

/// From now on the variable has this value, for libraries of this process. Not while another thread
/// may read variables: as the program starts, or before the library that reads it is used.
void set_environment_variable(const std::string& name, const std::string& value);

/// From now on the variable is not set. When: as for set_environment_variable.
void unset_environment_variable(const std::string& name);

/// Whether a switch is on: set to 1, true, yes or on, case ignored.
/// Errors: kUsage for any value that is neither that nor 0, false, no, off or empty.
bool environment_switch(const std::string& name);

}  // namespace tessera::base
