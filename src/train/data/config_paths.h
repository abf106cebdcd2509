// The files and folders that a config names to read from, looked up before any of them is opened.
// Pure. Next: data_files.h for what a pattern means.
#pragma once

#include <filesystem>

#include "train/config/config.h"
#include "train/config/config_resolve.h"

namespace tessera::train {

/// Relative paths are those of the working folder. Errors: kIo where `verb` reads one that is not
/// there: names the key, the working folder and, where the path is there beside `config_file`, that
/// one. An absolute path is left to who opens it.
void require_relative_paths(const Config& config, const std::filesystem::path& config_file,
                            Verb verb);

}  // namespace tessera::train
