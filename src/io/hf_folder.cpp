#include "io/hf_folder.h"

#include <cstring>
#include <system_error>
#include <utility>

#include "base/printable.h"
#include "io/folder_file.h"
#include "io/hf_shards.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Far above anything published (an index of 100 000 tensors has about 10 MB).
constexpr std::int64_t kMaxHfConfigBytes = 4 << 20;
constexpr std::int64_t kMaxIndexBytes = 32 << 20;
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

}  // namespace

HfFolder HfFolder::open(const fs::path& folder) {
  std::error_code ignored;
  const auto status = fs::status(folder, ignored);
  TESSERA_CHECK(fs::is_directory(status), ErrorKind::kIo, "cannot open ", shown(folder), ": found ",
                fs::is_regular_file(status) ? "a file"
                : fs::exists(status)        ? "something that is no folder"
                                            : "no such folder",
                ", expected a model folder with config.json and safetensors");
  HfFolder model;
  model.path_ = folder;
  model.config_text_ = read_config_text(file_inside(folder, "config.json"));
  if (is_there(folder / kSingleFile)) {
    model.add_file(file_inside(folder, std::string(kSingleFile)));
  } else {
    TESSERA_CHECK(is_there(folder / kIndexFile), ErrorKind::kIo, folder.native(),
                  ": found neither ", kSingleFile, " nor ", kIndexFile, ", expected one of them");
    model.open_indexed(file_inside(folder, std::string(kIndexFile)));
  }
  return model;
}

HfFolder HfFolder::of_file(const fs::path& file) {
  HfFolder one;
  one.path_ = file.has_parent_path() ? file.parent_path() : fs::path(".");
  one.add_file(file);
  return one;
}

std::string HfFolder::read_config_text(const fs::path& path) {
  return read_text_file(path, kMaxHfConfigBytes);
}

void HfFolder::add_file(const fs::path& path) {
  files_.emplace_back(path);
  const std::size_t file = files_.size() - 1;
  for (const TensorInfo& tensor : files_[file].header().tensors) {
    const auto [at, added] = tensors_.try_emplace(tensor.name, Tensor{file, &tensor});
    TESSERA_CHECK(added, ErrorKind::kFormat, path_.native(), ": found the tensor ",
                  printable(tensor.name), " in ",
                  files_[at->second.file].path().filename().native(), " and in ",
                  path.filename().native(), ", expected it once");
  }
}

void HfFolder::open_indexed(const fs::path& index_path) {
  const HfIndex index =
      parse_hf_index(read_text_file(index_path, kMaxIndexBytes), index_path.native());
  std::map<std::string_view, std::size_t> opened;
  for (const auto& [tensor, file] : index.weight_map) opened.try_emplace(file, 0);
  files_.reserve(opened.size());
  for (auto& [file, number] : opened) {
    number = files_.size();
    add_file(file_inside(path_, std::string(file)));
  }
  for (const auto& [tensor, file] : index.weight_map) {
    const auto found = tensors_.find(tensor);
    TESSERA_CHECK(found != tensors_.end() && found->second.file == opened[file], ErrorKind::kFormat,
                  index_path.native(), ": found ", printable(tensor), " in ", printable(file),
                  ", which does not hold it");
  }
  for (const auto& [name, tensor] : tensors_) {
    TESSERA_CHECK(index.weight_map.contains(name), ErrorKind::kFormat,
                  files_[tensor.file].path().native(), ": found the tensor ", printable(name),
                  ", which ", kIndexFile, " does not name");
  }
}

const HfFolder::Tensor& HfFolder::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  TESSERA_CHECK(found != tensors_.end(), ErrorKind::kFormat, path_.native(), ": found no tensor ",
                printable(name), " among its ", tensors_.size());
  return found->second;
}

const TensorInfo* HfFolder::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second.info;
}

std::span<const std::byte> HfFolder::range(std::string_view name, std::int64_t begin_element,
                                           std::int64_t end_element) const {
  const Tensor& tensor = at(name);
  return files_[tensor.file].range(*tensor.info, begin_element, end_element);
}

void HfFolder::release(std::string_view name, std::span<const std::byte> view) const {
  files_[at(name).file].release(view);
}

std::int64_t HfFolder::total_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.info->size_bytes();
  return bytes;
}

std::optional<DType> HfFolder::bulk_dtype() const {
  std::map<DType, std::int64_t> elements;
  for (const auto& [name, tensor] : tensors_) {
    elements[tensor.info->dtype] += tensor.info->numel();
  }
  return tessera::bulk_dtype(elements);
}

HfTensors::HfTensors(HfFolder folder) : folder_(std::move(folder)) {
  for (const auto& [name, tensor] : folder_.tensors()) {
    tensors_[name] = {tensor.info->dtype, tensor.info->shape, tensor.info->dtype};
  }
}

void HfTensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                     std::span<std::byte> out) const {
  const auto bytes = folder_.range(name, begin, end);
  TESSERA_INVARIANT(bytes.size() == out.size(), "a buffer of another size");
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  folder_.release(name, bytes);
}

}  // namespace tessera
