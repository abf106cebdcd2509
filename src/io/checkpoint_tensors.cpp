#include "io/checkpoint_tensors.h"

#include <string>
#include <utility>

namespace tessera {

CheckpointTensors::CheckpointTensors(CheckpointFolder folder) : folder_(std::move(folder)) {
  for (const std::string& name : folder_.names(kModelPrefix)) {
    const CheckpointTensor& tensor = *folder_.find(name);
    tensors_[name.substr(kModelPrefix.size())] = {tensor.dtype, tensor.shape,
                                                  tensor.source_dtype.value_or(tensor.dtype)};
  }
}

void CheckpointTensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                             std::span<std::byte> out) const {
  folder_.read(std::string(kModelPrefix).append(name), begin, end, out);
}

std::vector<TensorSource::HashedFile> CheckpointTensors::hashed_files() const {
  std::vector<HashedFile> files;
  for (const auto& name : folder_.data_files()) {
    files.push_back({name, folder_.manifest().files.find(name)->second.bytes});
  }
  return files;
}

}  // namespace tessera
