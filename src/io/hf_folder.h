// HfFolder: a model folder as the Hugging Face hub publishes it: config.json next to safetensors
// files. And the distribution of a model's tensors over these files, as a value that is planned,
// written and read.
//
// One file is model.safetensors; several are model-00001-of-0000N.safetensors with
// model.safetensors.index.json, which says which file holds which tensor. The index's text is
// checked by itself (parse_hf_index); whether the files exist and hold what it says is checked when
// they are opened: opening reads the config's text and every header, and checks that index and
// files agree; no weight is read. models/ interprets the names. Next: models/family.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "io/tensor_source.h"

namespace tessera {

struct HfShard {
  std::string file;
  std::vector<TensorSpec> tensors;
};

/// Units: bytes of tensor data.
std::int64_t size_bytes(const TensorSpec& tensor);

/// Fills files one after the other in the order of `tensors`; a tensor larger than `max_bytes` has
/// a file of its own. Returns at least one file.
std::vector<HfShard> plan_shards(const std::vector<TensorSpec>& tensors, std::int64_t max_bytes);

/// Returns model.safetensors.index.json of these files.
std::string index_json(const std::vector<HfShard>& shards);

/// model.safetensors.index.json as a value: which file holds which tensor.
struct HfIndex {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name, without any folder
};

/// Errors: kFormat for malformed JSON, duplicate keys, an empty or missing weight_map, a file name
/// that is not a plain name (it could lead outside the folder). Other keys are not read: the totals
/// under `metadata` are wrong in published folders that tie weights.
HfIndex parse_hf_index(std::string_view text, std::string_view where);

/// Returns the bytes that "5GB", "500MB", "2KB" (powers of 1000), "1GiB", ... (of 1024) or "4096"
/// mean, as byte_size() reads them. Errors: kUsage for anything else and for 0.
std::int64_t parse_byte_size(std::string_view text, std::string_view option);

/// Parts of messages: what is expected where a path is no model folder, and a hint where nothing is
/// there.
inline constexpr std::string_view kModelFolder = "a model folder with config.json and safetensors";
inline constexpr std::string_view kNoHub = " (nothing is fetched from a hub)";

class HfFolder {
 public:
  struct Tensor {
    std::size_t file = 0;  ///< index for file()
    const TensorInfo* info = nullptr;
  };

  /// Opens model.safetensors where it exists, else all files that model.safetensors.index.json
  /// names. Errors: kIo for anything missing; kFormat for malformed files, a tensor on which index
  /// and files disagree or that two files hold, a file or link that leads outside the folder (the
  /// blobs of a hub cache, where the folder is one of its snapshots, count as inside).
  static HfFolder open(const std::filesystem::path& folder);

  /// Opens a single safetensors file, for inspection: tensors without a config. Errors: as open().
  static HfFolder of_file(const std::filesystem::path& file);

  /// Returns only config.json's text, for a model that starts from scratch. `path` is the file.
  static std::string read_config_text(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::string& config_text() const { return config_text_; }

  /// By name, each tensor once.
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  ///< nullptr where there is none
  std::size_t num_files() const { return files_.size(); }
  const SafetensorsFile& file(std::size_t index) const { return files_[index]; }

  /// Views the elements [begin, end) of a tensor, row-major. Errors: kFormat for an unknown name;
  /// kUsage outside the tensor.
  std::span<const std::byte> range(std::string_view name, std::int64_t begin_element,
                                   std::int64_t end_element) const;
  /// Releases the pages of a view of `name`.
  void release(std::string_view name, std::span<const std::byte> view) const;

  /// Units: bytes of tensor data in all files.
  std::int64_t total_bytes() const;
  /// The floating dtype of most floating elements (the narrower of two equals); none where no
  /// tensor is floating.
  std::optional<DType> bulk_dtype() const;

 private:
  void open_indexed(const std::filesystem::path& index_path);
  void add_file(const std::filesystem::path& path);
  const Tensor& at(std::string_view name) const;

  std::filesystem::path path_;
  std::string config_text_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

/// The tensors of a folder as a TensorSource.
class HfTensors final : public TensorSource {
 public:
  explicit HfTensors(HfFolder folder);

  const HfFolder& folder() const { return folder_; }
  const std::filesystem::path& path() const override { return folder_.path(); }
  const Tensors& tensors() const override { return tensors_; }
  /// Copies, and then releases the pages of the mapping.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;

 private:
  HfFolder folder_;
  Tensors tensors_;
};

}  // namespace tessera
