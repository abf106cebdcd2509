#include "train/hf_export.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <system_error>

#include "base/mapped_file.h"
#include "base/printable.h"
#include "grad/torch_dtype.h"
#include "io/atomic_file.h"
#include "io/folder_file.h"
#include "tessera/error.h"
#include "train/base_model.h"
#include "train/load_balance.h"
#include "train/lora_export.h"
#include "train/weights.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// What users of the folder need beside the model, where it is there.
std::vector<fs::path> files_to_copy(const fs::path& origin) {
  std::error_code ignored;
  if (origin.empty() || !fs::is_directory(origin, ignored)) return {};
  std::vector<std::string> names{"tokenizer.json",    "tokenizer_config.json",
                                 "tokenizer.model",   "special_tokens_map.json",
                                 "added_tokens.json", "vocab.json",
                                 "merges.txt",        "generation_config.json"};
  std::error_code failed;
  fs::directory_iterator entry(origin, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("chat_template") && !entry->is_directory(ignored)) names.push_back(name);
  }
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot list ", shown(origin), ": ", failed.message());
  std::sort(names.begin(), names.end());
  std::vector<fs::path> found;
  for (const std::string& name : names) {
    if (const auto file = optional_file_inside(origin, name)) found.push_back(*file);
  }
  return found;
}

/// The parameters in the model's order, a tied one once, then the buffers.
std::vector<TensorSpec> tensors_to_write(const ModelSource& source, const ExportOptions& options) {
  check_tensors(source);
  std::vector<TensorSpec> tensors;
  for (const models::ParameterSpec& parameter : source.description.parameters) {
    if (!parameter.tied_to.empty() || models::is_adapter(parameter.name)) continue;
    const FileForm form = file_form(parameter);
    for (const std::string& name : form.names) {
      const SourceTensor& stored = *source.folder->find(name);
      if (!is_floating(stored.dtype) || is_float8(stored.dtype)) {
        throw not_floating(*source.folder, "tensor", name, stored.dtype);
      }
      tensors.push_back({name, options.dtype.value_or(stored.original), form.file.shape});
    }
  }
  for (const models::BufferSpec& buffer : source.description.buffers) {
    const SourceTensor& stored = *source.folder->find(buffer.name);
    tensors.push_back({buffer.name, options.dtype.value_or(stored.original), buffer.shape});
  }
  return tensors;
}

/// What families have no place for: readers of the folder choose experts without it.
std::vector<std::string> left_out(const ModelSource& source) {
  std::vector<std::string> names;
  for (const auto& bias : stored_expert_biases(*source.folder, source.spec)) {
    names.push_back(bias.name);
  }
  return names;
}

/// Published wider than it is stored: the folder that is written looks as if it had all digits.
std::vector<std::string> widened(const ModelSource& source, const std::vector<TensorSpec>& specs) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : specs) {
    const SourceTensor& stored = *source.folder->find(spec.name);
    if (!represents(stored.dtype, stored.original) && !represents(stored.dtype, spec.dtype)) {
      names.push_back(spec.name);
    }
  }
  return names;
}

/// Errors: kFormat where a finite value has become infinite.
at::Tensor narrowed(const at::Tensor& values, DType dtype, const std::string& name) {
  at::Tensor result = values.to(to_scalar_type(dtype));
  if (represents(dtype, to_dtype(values.scalar_type()))) return result;
  TESSERA_CHECK(values.isfinite().equal(result.isfinite()), ErrorKind::kFormat, "convert: tensor ",
                name, ": found a value that ", to_string(dtype),
                " cannot hold, expected none; choose --dtype float32");
  return result;
}

void write_shard(const ExportPlan& plan, const HfShard& shard, const fs::path& folder) {
  SafetensorsWriter writer(folder / shard.file, shard.tensors, {{"format", "pt"}});
  for (const TensorSpec& tensor : shard.tensors) {
    const std::int64_t numel = size_bytes(tensor) / size_of(tensor.dtype);
    for (std::int64_t begin = 0; begin < numel; begin += kLoadChunk) {
      const auto end = std::min(begin + kLoadChunk, numel);
      const at::Tensor part =
          narrowed(plan.read(tensor.name, begin, end), tensor.dtype, tensor.name);
      writer.write_range(tensor.name, begin,
                         {static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
    }
  }
  writer.finish();
}

}  // namespace

ExportPlan plan_export(const ModelSource& source, const ExportOptions& options) {
  TESSERA_INVARIANT(source.folder != nullptr, "a model without weights");
  if (source.adapters) check_adapters(source);
  ExportPlan plan;
  const std::vector<TensorSpec> tensors = tensors_to_write(source, options);
  plan.shards = plan_shards(tensors, options.max_shard_bytes);
  plan.widened = widened(source, tensors);
  plan.left_out = left_out(source);
  std::map<DType, std::int64_t> elements;
  for (const TensorSpec& tensor : tensors) {
    plan.size_bytes += size_bytes(tensor);
    elements[tensor.dtype] += size_bytes(tensor) / size_of(tensor.dtype);
  }
  models::ModelSpec spec = source.spec;
  spec.dtype = bulk_dtype(elements);
  plan.texts["config.json"] = models::config_json(spec);
  if (plan.shards.size() > 1) plan.texts["model.safetensors.index.json"] = index_json(plan.shards);
  plan.copies = files_to_copy(source.origin);
  verify_weights(*source.folder);
  if (source.adapters) verify_weights(*source.adapters);
  if (source.base_hash) check_base(source);
  plan.read = merged_elements(source);
  return plan;
}

void write_export(const ExportPlan& plan, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  for (const HfShard& shard : plan.shards) write_shard(plan, shard, folder);
  for (const auto& [name, text] : plan.texts) {
    write_atomically(folder / name, std::as_bytes(std::span(text)));
  }
  for (const fs::path& copied : plan.copies) {
    const MappedFile content(copied);
    write_atomically(folder / copied.filename(), content.bytes());
  }
}

}  // namespace tessera::train
