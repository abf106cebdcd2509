// The minor version of the libtorch that is loaded. libtorch keeps no ABI between minor versions,
// and the system's loader accepts any by its name: LD_LIBRARY_PATH may give a program another one
// than it was linked with. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::base {

/// Returns "2.13" from aoti_torch_abi_version() or TORCH_ABI_VERSION, which have one byte for each
/// part.
std::string torch_minor(std::uint64_t abi);

/// Compares the minor version of the libtorch of this process with that of the build. `library`:
/// the file that it was loaded from. Errors: kConfig where they differ.
void require_torch_minor(std::uint64_t loaded, std::uint64_t built,
                         const std::filesystem::path& library);

}  // namespace tessera::base
