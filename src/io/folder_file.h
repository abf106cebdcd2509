// Files of a folder that somebody else made: found without being led out of it, by a name or by a
// link.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Whether a name can only mean a file inside the folder that it is looked up in: no separator, not
/// "." or "..", no control byte, not longer than file systems allow.
bool is_plain_file_name(std::string_view name);

/// FOLDER/NAME. Links are followed here, once. Errors: kIo where it cannot be reached; kFormat
/// where it is a link to somewhere else than the folder (the blobs of a hub cache, where the folder
/// is one of its snapshots, are inside).
std::filesystem::path file_inside(const std::filesystem::path& folder, const std::string& name);

/// The same; none where there is no such name. Errors: also kFormat for anything but a plain file.
std::optional<std::filesystem::path> optional_file_inside(const std::filesystem::path& folder,
                                                          const std::string& name);

}  // namespace tessera
