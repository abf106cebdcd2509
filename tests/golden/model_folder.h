// Model folders that tests derive from the reference data: other spellings, other files, or
// damaged.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "support/temporary_folder.h"

namespace tessera::golden {

struct StoredTensor {
  TensorSpec spec;
  std::vector<std::byte> bytes;
};

/// Reads model.safetensors of a folder, in the order of its bytes.
std::vector<StoredTensor> read_model(const std::filesystem::path& folder);

/// Writes config.json and the tensors: into model.safetensors, or with more than one file in turn
/// into as many, with an index.
void write_model(const std::filesystem::path& folder, const std::string& config,
                 const std::vector<StoredTensor>& tensors, int files);

/// A folder of tests/golden/data, as write_data.py writes it.
std::filesystem::path data_folder(const std::string& name);

enum class Spelling {
  kWritten,
  kHub
};  ///< config.json as transformers writes it, as the hub has it
enum class Files { kOne, kSeveral };

/// The folder of the reference data in another form; derived ones are made once and kept until the
/// process ends.
std::filesystem::path model_folder(const std::string& name, Spelling spelling, Files files);

/// A copy of the folder with tensors that `change` has changed, in a temporary folder of its own
/// number.
std::filesystem::path changed_folder(const std::string& name,
                                     const std::function<void(std::vector<StoredTensor>&)>& change);

/// A fresh path in this process's temporary folder.
std::filesystem::path temporary_path(const std::string& what);

}  // namespace tessera::golden
