// The tensors of a Hugging Face folder as a TensorSource.
#pragma once

#include "io/hf_folder.h"
#include "io/tensor_source.h"

namespace tessera {

class HfTensors final : public TensorSource {
 public:
  explicit HfTensors(HfFolder folder);

  const HfFolder& folder() const { return folder_; }
  const std::filesystem::path& path() const override { return folder_.path(); }
  const Tensors& tensors() const override { return tensors_; }
  /// Gives the pages of the mapping back.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;

 private:
  HfFolder folder_;
  Tensors tensors_;
};

}  // namespace tessera
