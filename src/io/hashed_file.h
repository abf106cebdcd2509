// Files that are written and read in one pass, with the hash of their content on the way.
//
// For the files of a checkpoint: large, written once from memory into a folder that gets its name
// later, read once from beginning to end. A file that has to appear under its name complete is
// another matter (atomic_file.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "base/hash.h"
#include "base/mapped_file.h"

namespace tessera {

/// Writes a new file (an old one, or a link, of the name is removed) and waits until its content is
/// on disk; its name is durable once its folder is (sync_folder). Returns the content's hash.
/// Errors: kIo naming it.
Hash128 write_hashed_file(const std::filesystem::path& path, std::span<const std::byte> bytes);
/// The same of several chunks, one behind the other.
Hash128 write_hashed_chunks(const std::filesystem::path& path,
                            const std::vector<std::span<const std::byte>>& chunks);

/// Where bytes of a file are wanted: those from `offset` on, as many as `to` has.
struct WantedBytes {
  std::int64_t offset = 0;
  std::span<std::byte> to;
};

/// Reads a file from beginning to end and returns its content's hash; bytes that are wanted are
/// left where they are wanted. `wanted` may come in any order, without overlap. Errors: kIo; kUsage
/// for bytes outside the file or wanted twice.
Hash128 read_hashed_file(const InputFile& file, std::vector<WantedBytes> wanted = {});

}  // namespace tessera
