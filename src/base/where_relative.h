// Names the folder in which a missing relative path was looked for. The relative path alone leaves
// it open: paths in a config are relative to the working folder, not to the folder of the config.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Returns " in the working folder 'FOLDER'" for a relative path, "" for an absolute one.
std::string where_relative(const std::filesystem::path& path);

}  // namespace tessera
