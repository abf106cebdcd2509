// Checks that the files and folders that a config names for reading exist, before any of them is
// opened. Pure. Next: data_files.h for the meaning of patterns.
#pragma once

#include <filesystem>

#include "train/config/config.h"
#include "train/config/config_resolve.h"

namespace tessera::train {

/// Relative paths are relative to the working folder. Errors: kIo where `verb` reads one that does
/// not exist: names the key, the working folder and, where the path exists next to `config_file`,
/// that file. Absolute paths are checked where they are opened.
void require_relative_paths(const Config& config, const std::filesystem::path& config_file,
                            Verb verb);

}  // namespace tessera::train
