// File names out of files that nobody vouches for.
#pragma once

#include <string_view>

namespace tessera {

/// Whether a name can only mean a file inside the folder that it is looked up in: no separator, not
/// "." or "..", no control byte, not longer than file systems allow.
bool is_plain_file_name(std::string_view name);

}  // namespace tessera
