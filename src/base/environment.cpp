#include "base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "tessera/error.h"

namespace tessera::base {

Environment environment() {
  Environment all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) all.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return all;
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

void set_environment_variable(const std::string& name, const std::string& value) {
  TESSERA_INVARIANT(::setenv(name.c_str(), value.c_str(), /*overwrite=*/1) == 0, name,
                    ": cannot be set");
}

void unset_environment_variable(const std::string& name) {
  TESSERA_INVARIANT(::unsetenv(name.c_str()) == 0, name, ": cannot be unset");
}

bool environment_switch(const std::string& name) {
  std::string value = environment_variable(name).value_or("");
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* on : {"1", "true", "yes", "on"}) {
    if (value == on) return true;
  }
  for (const char* off : {"", "0", "false", "no", "off"}) {
    if (value == off) return false;
  }
  throw Error(ErrorKind::kUsage, concat(name, ": found \"", value, "\", expected 1 or 0"));
}

}  // namespace tessera::base
