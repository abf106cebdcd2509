// Random checkpoints: tensors cut into boxes and flat ranges in every way that the format allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint_manifest.h"

namespace tessera::testing {

using Random = std::mt19937_64;

inline std::int64_t pick(Random& random, std::int64_t from, std::int64_t to) {
  return from + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
}

/// A tensor of random shape (0 to 3 dims) whose pieces lie in `files`.
CheckpointTensor random_tensor(Random& random, const std::string& name,
                               const std::vector<std::string>& files);

/// Some tensors of a model and its optimizer in up to four files; sizes and hashes are zero. Of
/// either format; keys of version 1 are any.
CheckpointManifest random_manifest(Random& random);
/// The blocks of tensors.jsonl.
std::vector<std::string> lines_of(const std::string& text);
/// Returns the result of reading both texts, with the tensors of all blocks.
CheckpointManifest parsed(const CheckpointTexts& texts);

/// A checkpoint on disk, and what its tensors hold.
struct WrittenCheckpoint {
  CheckpointManifest manifest;
  std::map<std::string, std::vector<std::byte>> values;  ///< by tensor, flattened
};
/// Writes a random one into `folder` (made here).
WrittenCheckpoint write_random_checkpoint(Random& random, const std::filesystem::path& folder);

/// A file of one 1-D tensor.
void write_safetensors(const std::filesystem::path& path, const std::string& name, DType dtype,
                       std::span<const std::byte> values);
/// Lists every file of the folder in the manifest and writes that next to them, in its format.
void finish_checkpoint(const std::filesystem::path& folder, CheckpointManifest& manifest);

}  // namespace tessera::testing
