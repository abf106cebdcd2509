// Which files the paths of data.path, [[data.source]] and validation.path mean. Pure.
//
// A path that is there means itself; another one with * ? or [ in it is a pattern, as glob(7) has
// them, and means all that matches, in the order of the names' bytes. What lies beside a NAME.bin and
// belongs to it is never meant by a pattern. Next: data.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "train/config/config.h"

namespace tessera::train {

/// Errors: kIo, naming `key`, for a pattern without a match.
std::vector<std::string> files_of(const std::vector<std::string>& paths, std::string_view key);

/// The configuration with files in place of patterns. Errors: as files_of.
Config with_files(Config config);

}  // namespace tessera::train
