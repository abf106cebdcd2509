// Files that are written and read in one pass, which also computes the hash of their content.
//
// They are the files of a checkpoint: large, written once from memory into a folder that gets its
// name later, read once from beginning to end. A file that must appear under its name complete is
// an AtomicFile (atomic_file.h).
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
/// The same for several parts, in order.
Hash128 write_hashed_parts(const std::filesystem::path& path,
                           const std::vector<std::span<const std::byte>>& parts);

/// The bytes of a file that are wanted: those from `offset` on, as many as `to` has.
struct WantedBytes {
  std::int64_t offset = 0;
  std::span<std::byte> to;
};

/// Reads a file from beginning to end and returns its content's hash; copies the wanted bytes to
/// where they are wanted. `wanted` may be in any order, without overlap. Errors: kIo; kUsage for
/// bytes outside the file or wanted twice.
Hash128 read_hashed_file(const InputFile& file, std::vector<WantedBytes> wanted = {});

}  // namespace tessera
