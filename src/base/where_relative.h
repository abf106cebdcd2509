// Where a path that is not there was looked for: a message that shows a relative one alone leaves open
// which folder it is of, and a config names paths of the working folder, not of its own.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// " in the working folder 'FOLDER'" for a relative path, "" for an absolute one.
std::string where_relative(const std::filesystem::path& path);

}  // namespace tessera
