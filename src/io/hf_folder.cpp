#include "io/hf_folder.h"

#include <algorithm>
#include <system_error>

#include "base/printable.h"
#include "io/hf_index.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Far above anything published (an index of 100 000 tensors has about 10 MB).
constexpr std::int64_t kMaxConfigBytes = 4 << 20;
constexpr std::int64_t kMaxIndexBytes = 32 << 20;
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

bool is_inside(const fs::path& file, const fs::path& folder) {
  const auto [rest, unused] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return rest == folder.end();
}

/// Links are followed here, once; a folder from a stranger must not name files elsewhere.
void check_inside(const fs::path& folder, const std::string& name) {
  std::error_code failed;
  const fs::path real_folder = fs::canonical(folder, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot open ", printable(folder.native(), 1024), ": ",
                failed.message());
  const fs::path real_file = fs::canonical(folder / name, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot open ", printable((folder / name).native(), 1024),
                ": ", failed.message());
  if (is_inside(real_file, real_folder)) return;
  // models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH is how the hub's cache shares files.
  const bool is_snapshot = real_folder.parent_path().filename() == "snapshots";
  const fs::path blobs = real_folder.parent_path().parent_path() / "blobs";
  TESSERA_CHECK(is_snapshot && is_inside(real_file, blobs), ErrorKind::kFormat, folder.native(),
                ": ", printable(name), " is a link to ", printable(real_file.native(), 1024),
                ", expected a file inside the folder; copy it there");
}

}  // namespace

HfFolder HfFolder::open(const fs::path& folder) {
  std::error_code ignored;
  TESSERA_CHECK(fs::is_directory(folder, ignored), ErrorKind::kIo, "cannot open ",
                printable(folder.native(), 1024),
                ": found no such folder, expected a model folder with config.json and safetensors");
  HfFolder model;
  model.path_ = folder;
  check_inside(folder, "config.json");
  model.config_text_ = read_config_text(folder / "config.json");
  if (is_there(folder / kSingleFile)) {
    model.open_file(std::string(kSingleFile));
  } else {
    TESSERA_CHECK(is_there(folder / kIndexFile), ErrorKind::kIo, folder.native(),
                  ": found neither ", kSingleFile, " nor ", kIndexFile, ", expected one of them");
    check_inside(folder, std::string(kIndexFile));
    model.open_indexed(folder / kIndexFile);
  }
  return model;
}

std::string HfFolder::read_config_text(const fs::path& path) {
  return read_text_file(path, kMaxConfigBytes);
}

void HfFolder::open_file(const std::string& name) {
  check_inside(path_, name);
  files_.emplace_back(path_ / name);
  const std::size_t file = files_.size() - 1;
  for (const TensorInfo& tensor : files_[file].header().tensors) {
    const auto [at, added] = tensors_.try_emplace(tensor.name, Tensor{file, &tensor});
    TESSERA_CHECK(added, ErrorKind::kFormat, path_.native(), ": found the tensor ",
                  printable(tensor.name), " in ",
                  files_[at->second.file].path().filename().native(), " and in ", name,
                  ", expected it once");
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
    open_file(std::string(file));
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
    if (is_floating(tensor.info->dtype)) elements[tensor.info->dtype] += tensor.info->numel();
  }
  std::optional<DType> bulk;
  for (const auto& [dtype, count] : elements) {
    const bool narrower = bulk && size_of(dtype) < size_of(*bulk);
    if (!bulk || count > elements[*bulk] || (count == elements[*bulk] && narrower)) bulk = dtype;
  }
  return bulk;
}

}  // namespace tessera
