#include "io/hf_folder.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/text/byte_size.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "base/where_relative.h"
#include "io/folder.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string numbered_name(std::size_t number, std::size_t count) {
  std::ostringstream name;
  name << "model-" << std::setfill('0') << std::setw(5) << number << "-of-" << std::setw(5) << count
       << ".safetensors";
  return name.str();
}

constexpr int kMaxIndexDepth = 8;

}  // namespace

std::int64_t size_bytes(const TensorSpec& tensor) {
  return checked_numel(tensor.shape, tensor.dtype, ErrorKind::kUsage, printable(tensor.name)) *
         size_of(tensor.dtype);
}

std::vector<HfShard> plan_shards(const std::vector<TensorSpec>& tensors, std::int64_t max_bytes) {
  std::vector<HfShard> shards(1);
  std::int64_t filled = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::int64_t bytes = size_bytes(tensor);
    if (!shards.back().tensors.empty() && bytes > max_bytes - filled) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().tensors.push_back(tensor);
    // A file that is over-full takes nothing more.
    filled = std::min(max_bytes, filled) + std::min(bytes, max_bytes - std::min(max_bytes, filled));
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1 ? "model.safetensors" : numbered_name(i + 1, shards.size());
  }
  return shards;
}

std::string index_json(const std::vector<HfShard>& shards) {
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  std::int64_t total = 0;
  for (const HfShard& shard : shards) {
    for (const TensorSpec& tensor : shard.tensors) {
      files[tensor.name] = shard.file;
      total += size_bytes(tensor);
    }
  }
  const nlohmann::ordered_json whole = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", files}};
  return whole.dump(2) + "\n";
}

HfIndex parse_hf_index(std::string_view text, std::string_view where) {
  const nlohmann::json root = parse_json_object(text, where, kMaxIndexDepth);
  const auto found = root.find("weight_map");
  TESSERA_CHECK(found != root.end() && found->is_object() && !found->empty(), ErrorKind::kFormat,
                where, ": found no tensor, expected an object weight_map of names and files");
  HfIndex index;
  for (const auto& [tensor, file] : found->items()) {
    TESSERA_CHECK(file.is_string(), ErrorKind::kFormat, where, ": found a JSON ", file.type_name(),
                  " as the file of ", printable(tensor), ", expected a file name");
    const auto& name = file.get_ref<const std::string&>();
    TESSERA_CHECK(is_plain_file_name(name), ErrorKind::kFormat, where, ": found the file ",
                  printable(name), " of ", printable(tensor),
                  ", expected the plain name of a file in the same folder");
    index.weight_map.emplace(tensor, name);
  }
  return index;
}

std::int64_t parse_byte_size(std::string_view text, std::string_view option) {
  const auto bytes = byte_size(text);
  TESSERA_CHECK(bytes, ErrorKind::kUsage, option, ": found ", printable(text),
                ", expected a size as 5GB, 500MB or 2GiB");
  return *bytes;
}

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

/// Refuses a folder without config.json; what peft and `convert` of adapters write has none.
void require_config(const fs::path& folder) {
  const fs::path config = folder / "config.json";
  if (is_there(config)) return;
  TESSERA_CHECK(!is_there(folder / "adapter_config.json"), ErrorKind::kIo, "cannot open ",
                shown(folder), ": found a LoRA adapter (adapter_config.json), expected ",
                kModelFolder,
                "; give the folder of the model that it adapts, or, for both together, the "
                "folder of the run that trained it");
  TESSERA_CHECK(false, ErrorKind::kIo, "cannot open ", shown(config),
                ": found no such file, expected ", kModelFolder, ", or the folder of a run");
}

/// Warns of a single file next to an index. Both may hold the whole model (some exports do), but no
/// file says so: the one that is not read may be the later one.
void log_files_next_to_index(const fs::path& folder) {
  if (!is_there(folder / kIndexFile)) return;
  std::string others;
  try {
    const auto index = parse_hf_index(
        read_text_file(file_inside(folder, std::string(kIndexFile)), kMaxIndexBytes), kIndexFile);
    std::set<std::string> files;
    for (const auto& [tensor, file] : index.weight_map) files.insert(file);
    if (files == std::set{std::string(kSingleFile)}) return;
    others = concat("which names ", printable(*files.begin()),
                    files.size() > 1 ? concat(" and ", files.size() - 1, " more") : "");
  } catch (const Error&) {
    others = "which cannot be read";  // nor need it be
  }
  log::warn(shown(folder), ": found ", kSingleFile, " next to ", kIndexFile, ", ", others, ": ",
            kSingleFile, " is read, as transformers does; remove the one that is left over");
}

}  // namespace

HfFolder HfFolder::open(const fs::path& folder) {
  std::error_code ignored;
  const auto status = fs::status(folder, ignored);
  TESSERA_CHECK(fs::is_directory(status), ErrorKind::kIo, "cannot open ", shown(folder), ": found ",
                fs::is_regular_file(status) ? std::string("a file")
                : fs::exists(status)        ? std::string("something that is no folder")
                                     : concat("no such folder", where_relative(folder), kNoHub),
                ", expected ", kModelFolder);
  require_config(folder);
  HfFolder model;
  model.path_ = folder;
  model.config_text_ = read_config_text(file_inside(folder, "config.json"));
  if (is_there(folder / kSingleFile)) {
    log_files_next_to_index(folder);
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
