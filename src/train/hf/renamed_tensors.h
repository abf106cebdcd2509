// A folder whose tensors have other names than the model's, or that holds more than the model does,
// as one that has those of the model alone.
//
// A model's class decides what the prefix of its names is, and a folder of a model that sees images
// has a text model in it. Bytes are the folder's own. Pure.
// Next: ../../io/tensor_source.h.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor_source.h"

namespace tessera::train {

class RenamedTensors final : public TensorSource {
 public:
  /// A name of the folder -> the model's; empty for a tensor that is left out.
  using Rename = std::function<std::string(std::string_view name)>;

  /// Errors: kFormat for two tensors that get one name, both named.
  RenamedTensors(std::shared_ptr<const TensorSource> folder, const Rename& rename);

  const std::filesystem::path& path() const override { return folder_->path(); }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;
  std::vector<HashedFile> hashed_files() const override { return folder_->hashed_files(); }
  void verify(const HashedFile& file) const override { folder_->verify(file); }

  /// As the folder calls them, ascending.
  const std::vector<std::string>& left_out() const { return left_out_; }
  /// Whether any tensor is not what the folder has.
  bool changes() const { return changes_; }

 private:
  std::shared_ptr<const TensorSource> folder_;
  Tensors tensors_;
  std::map<std::string, std::string, std::less<>> in_folder_;  // by the model's name
  std::vector<std::string> left_out_;
  bool changes_ = false;
};

}  // namespace tessera::train
