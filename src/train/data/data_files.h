// Which files the paths of data.path, [[data.source]] and validation.path mean. Pure.
//
// A path that is there means itself; another one with * ? or [ in it is a pattern, as glob(7) has
// them, and means all that matches, in the order of the names' bytes. A file next to a NAME.bin
// that belongs to it is never meant by a pattern. Next: data.h.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/config/config.h"

namespace tessera::train {

/// Whether `path` has a * ? or [ in it and nothing is there by that name.
bool is_pattern(const std::string& path);

/// The files that match a pattern, in the order of the bytes of their names. Errors: kIo, naming
/// `key`, where a folder cannot be listed.
std::vector<std::string> matches_of(const std::string& pattern, std::string_view key);

/// Errors: kIo, naming `key`, for a pattern without a match, or with folders that cannot be
/// listed.
std::vector<std::string> files_of(const std::vector<std::string>& paths, std::string_view key);

/// NAME.docs.bin of NAME.bin.
std::filesystem::path borders_of(const std::filesystem::path& path);

/// The first file without which rows are not packed by themselves: a mask or the borders next to a
/// NAME.bin, or one of `files` that is no NAME.bin. None where nothing lacks.
std::optional<std::string> lacks_for_packing(const std::vector<std::string>& files);

/// The first borders that a NAME.bin of `files` lacks.
std::optional<std::string> lacks_borders(const std::vector<std::string>& files);

/// Whether rows hold whole documents of a source's `files`: as asked, else where nothing lacks.
bool packs_documents(const std::vector<std::string>& files, std::optional<Packing> packing);

/// The configuration with files in place of patterns. Errors: as files_of.
Config with_files(Config config);

/// Returns the configuration with parallelism.context_parallel_parts filled in where rows of
/// training.seq_len are packed (parts_of_packed_rows()). Files that are not there pack nothing.
Config with_context_parts(Config config);

}  // namespace tessera::train
