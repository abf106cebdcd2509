// Environment variables: no other file reads or writes them.
//
// All code that depends on a variable takes a value or a map of them, so that it can be tested
// without setting any. A child's environment is passed to execve. A variable is written only where
// a library in this process reads its setting nowhere else.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace tessera::base {

using Environment = std::map<std::string, std::string, std::less<>>;

/// Returns all variables, as they are now.
Environment environment();

/// Returns one variable; none where it is not set (an empty one is set).
std::optional<std::string> environment_variable(const std::string& name);

/// Sets the variable for libraries of this process. Must not be called while another thread may
/// read variables: only as the program starts, or before the library that reads it is used.
void set_environment_variable(const std::string& name, const std::string& value);

/// Removes the variable. It may be called when set_environment_variable may.
void unset_environment_variable(const std::string& name);

/// Whether a switch is on: set to 1, true, yes or on, case ignored.
/// Errors: kUsage for any other value but 0, false, no, off or empty.
bool environment_switch(const std::string& name);

}  // namespace tessera::base
