// The tensors of a checkpoint, whole, from any writer.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint_folder.h"

namespace tessera::test {

/// By name; every file is verified.
inline std::map<std::string, std::vector<std::byte>> all_tensors(
    const std::filesystem::path& path) {
  const auto checkpoint = CheckpointFolder::open(path);
  checkpoint.verify_all();
  std::map<std::string, std::vector<std::byte>> values;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    auto& bytes = values[name];
    bytes.resize(static_cast<std::size_t>(tensor.numel() * size_of(tensor.dtype)));
    checkpoint.read(name, 0, tensor.numel(), bytes);
  }
  return values;
}

}  // namespace tessera::test
