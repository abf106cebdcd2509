// Checks whether a library is a whole file: one that was cut short can still be mapped, and ends
// the process by SIGBUS where its missing part is read. Pure.
#pragma once

#include <filesystem>

namespace tessera::loader {

/// Checks that the file has all bytes that its ELF header and its segments name.
/// Errors: kIo, also where it is no regular file, or no library of this machine.
void check_library(const std::filesystem::path& path);

}  // namespace tessera::loader
