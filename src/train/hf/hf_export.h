// A model as a Hugging Face folder that transformers loads: config.json in the hub's spelling,
// safetensors files, tokenizer and processors of the folder that training began with. Adapters as
// other programs take them: peft's files, or merged into the model that they were trained with.
//
// The files to write are a value, planned and refused before the first byte; writing goes tensor
// by tensor in small parts, so that no model is ever in memory. Next: io/hf_folder.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/hf_folder.h"
#include "train/hf/model_source.h"

namespace tessera::train {

struct ExportOptions {
  std::optional<DType> dtype;  ///< of every tensor; none = as it was published, else as stored
  std::int64_t max_shard_bytes = 5'000'000'000;
};

struct ExportPlan {
  std::vector<HfShard> shards;
  std::map<std::string, std::string> texts;  ///< files by name: config.json, the index
  /// Copied as they are: files by name, which may begin with a folder's; those of tokenizers and
  /// processors, and generation_config.json.
  std::map<std::string, std::filesystem::path> copies;
  std::int64_t size_bytes = 0;  ///< of all tensors
  std::optional<DType> dtype;   ///< as ExportOptions asked
  /// Tensors whose values lost digits before the checkpoint was written, and that are written in a
  /// wider dtype all the same.
  std::vector<std::string> widened;
  /// Tensors that `read` has rounded, with what the source stores them as (eight-bit blocks).
  std::map<std::string, DType> rounded_from;
  /// Tensors of the checkpoint that the folder has no place for: biases that balance experts.
  std::vector<std::string> left_out;
  /// The elements [begin, end) of one of its tensors, 1-D, in the dtype they are kept in.
  std::function<at::Tensor(const std::string& name, std::int64_t begin, std::int64_t end)> read;
};

/// The whole model, adapters merged into it where there are some. `source` has a folder and must
/// outlive the plan; a checkpoint's files are verified, so that a damaged one is refused before
/// anything is written. Errors: kFormat naming such a file, for tensors that are not the model's or
/// the adapters', or not floating, or for a tokenizer file that is a link out of its folder;
/// kConfig for another model than the adapters were trained with; kIo.
ExportPlan plan_export(const ModelSource& source, const ExportOptions& options);

/// Writes the files of the plan into `folder`, which is there. Errors: kIo; kFormat for a value
/// that does not fit into the dtype that is written.
void write_export(const ExportPlan& plan, const std::filesystem::path& folder);

/// adapter_model.safetensors and adapter_config.json, as peft's `save_pretrained` names them;
/// `source` has adapters and must outlive the plan. Errors: kFormat naming a damaged file.
ExportPlan plan_adapter_export(const ModelSource& source, const ExportOptions& options);

/// Reads the model's elements, in the folder's dtype; of layers with an adapter W + alpha / rank *
/// B A in float32 at least. `source` must outlive the result.
std::function<at::Tensor(const std::string& name, std::int64_t begin, std::int64_t end)>
merged_elements(const ModelSource& source);

}  // namespace tessera::train
