// The model's tensors of a checkpoint as a TensorSource: what ranks cut apart reads as a whole
// here.
#pragma once

#include "io/checkpoint_folder.h"
#include "io/tensor_source.h"

namespace tessera {

class CheckpointTensors final : public TensorSource {
 public:
  explicit CheckpointTensors(CheckpointFolder folder);

  const CheckpointFolder& folder() const { return folder_; }
  const std::filesystem::path& path() const override { return folder_.path(); }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;
  std::vector<HashedFile> hashed_files() const override;
  void verify(const HashedFile& file) const override { folder_.verify(file.name); }

 private:
  CheckpointFolder folder_;
  Tensors tensors_;  // without "model/", and without the optimizer's
};

}  // namespace tessera
