#include "train/hf/hf_export.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "grad/torch_dtype.h"
#include "io/atomic_file.h"
#include "io/folder.h"
#include "models/description.h"
#include "models/expert_bias.h"
#include "models/family.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/hf/model_source.h"
#include "train/hf/weights.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Whether users of the folder need the file in addition to the model: files that transformers and
/// tokenizers' own libraries save or read of tokenizers, of processors of images and sound, and of
/// chat templates; their code, where the folder brings its own.
bool belongs_to_a_processor(std::string_view name) {
  constexpr std::string_view kNames[] = {"special_tokens_map.json", "added_tokens.json",
                                         "normalizer.json", "generation_config.json",
                                         "tekken.json"};
  constexpr std::string_view kBeginnings[] = {"tokenizer", "vocab", "merges", "chat_template"};
  constexpr std::string_view kEndings[] = {"processor_config.json", ".tiktoken", ".model"};
  constexpr std::string_view kCode[] = {"tokenization_", "processing_", "image_processing_",
                                        "video_processing_", "feature_extraction_"};
  const auto begins = [name](std::string_view text) { return name.starts_with(text); };
  const auto ends = [name](std::string_view text) { return name.ends_with(text); };
  return std::ranges::find(kNames, name) != std::end(kNames) ||
         std::ranges::any_of(kBeginnings, begins) || std::ranges::any_of(kEndings, ends) ||
         (name.ends_with(".py") && std::ranges::any_of(kCode, begins));
}

/// Plain files of a folder that `wanted`, by name, in front of which `before` stands.
template <class Wanted>
void add_files(const fs::path& folder, const std::string& before, const Wanted& wanted,
               std::map<std::string, fs::path>& found) {
  std::error_code ignored, failed;
  fs::directory_iterator entry(folder, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (entry->is_directory(ignored) || !wanted(name)) continue;
    if (const auto file = optional_file_inside(folder, name)) found.emplace(before + name, *file);
  }
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot list ", shown(folder), ": ", failed.message());
}

std::map<std::string, fs::path> files_to_copy(const fs::path& origin) {
  constexpr std::string_view kMoreTemplates = "additional_chat_templates";
  std::map<std::string, fs::path> found;
  std::error_code ignored;
  if (origin.empty() || !fs::is_directory(origin, ignored)) return found;
  add_files(origin, "", belongs_to_a_processor, found);
  const fs::path more = origin / kMoreTemplates;
  if (fs::is_directory(more, ignored)) {
    add_files(
        more, concat(kMoreTemplates, "/"),
        [](std::string_view name) { return name.ends_with(".jinja"); }, found);
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
    // transformers, too, always keeps this one in fp32.
    const DType dtype = models::HasExpertBias::is_stored_name(buffer.name)
                            ? DType::kFloat32
                            : options.dtype.value_or(stored.original);
    tensors.push_back({buffer.name, dtype, buffer.shape});
  }
  return tensors;
}

/// Tensors that the families have no place for: readers of the folder choose experts without them.
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
  plan.dtype = options.dtype;
  const std::vector<TensorSpec> tensors = tensors_to_write(source, options);
  plan.shards = plan_shards(tensors, options.max_shard_bytes);
  plan.widened = widened(source, tensors);
  plan.left_out = left_out(source);
  std::map<DType, std::int64_t> elements;
  for (const TensorSpec& tensor : tensors) {
    plan.size_bytes += size_bytes(tensor);
    elements[tensor.dtype] += size_bytes(tensor) / size_of(tensor.dtype);
    const auto stored = source.folder->find(tensor.name)->rounded_from;
    if (stored) plan.rounded_from.emplace(tensor.name, *stored);
  }
  models::ModelSpec spec = source.spec;
  spec.dtype = bulk_dtype(elements);
  plan.texts["config.json"] = models::config_json(spec);
  if (plan.shards.size() > 1) plan.texts["model.safetensors.index.json"] = index_json(plan.shards);
  plan.copies = files_to_copy(source.origin);
  verify_weights(*source.folder);
  if (source.adapters) verify_weights(*source.adapters);
  if (source.base_hash) check_base(source, *World::of_one());
  plan.read = merged_elements(source);
  return plan;
}

void write_export(const ExportPlan& plan, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  for (const HfShard& shard : plan.shards) write_shard(plan, shard, folder);
  for (const auto& [name, text] : plan.texts) {
    write_atomically(folder / name, std::as_bytes(std::span(text)));
  }
  for (const auto& [name, copied] : plan.copies) {
    const fs::path file = folder / name;
    std::error_code failed;
    fs::create_directories(file.parent_path(), failed);
    TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot make ", shown(file.parent_path()), ": ",
                  failed.message());
    const MappedFile content(copied);
    write_atomically(file, content.bytes());
  }
}

namespace {

/// The prefix that peft puts before the names of the model.
constexpr std::string_view kPeftPrefix = "base_model.model.";

std::string last_component(const std::string& name) { return name.substr(name.rfind('.') + 1); }

/// Modules may have other names in transformers than in files: that of experts, whose products are
/// parameters there, and the decoder's stem.
std::string in_transformers(const models::ModelSpec& spec, const std::string& name) {
  const models::MoeNames& names = models::traits(spec.family).moe_names;
  const models::DecoderNames& decoder = models::traits(spec.family).names;
  std::string result = name;
  const std::size_t at = result.find(concat(".", names.module, "."));
  if (!names.module_in_transformers.empty() && at != std::string::npos) {
    result.replace(at + 1, names.module.size(), names.module_in_transformers);
  }
  if (!decoder.stem_in_transformers.empty() && result.starts_with(decoder.stem + ".")) {
    result.replace(0, decoder.stem.size(), decoder.stem_in_transformers);
  }
  return result;
}

/// Whether peft would put the adapter of this module, listed among target_modules, on the routed
/// experts. Listed as a parameter it stays where it is, with the same names and shapes in the file.
bool is_taken_for_experts(const ModelSource& source, const std::string& layer) {
  constexpr std::array<std::string_view, 3> kNames{"gate_proj", "up_proj", "down_proj"};
  return models::traits(source.spec.family).moe_names.peft_takes_mlp_for_experts &&
         !models::is_of_experts(layer) &&
         std::ranges::find(kNames, last_component(layer)) != kNames.end();
}

/// Modules that have an adapter. peft matches whole names or their last components: the short form
/// where it means the same.
std::vector<std::string> target_modules(const ModelSource& source) {
  std::set<std::string> adapted, endings;
  for (const std::string& layer : source.lora.layers) {
    if (models::is_of_experts(layer) || is_taken_for_experts(source, layer)) continue;
    adapted.insert(in_transformers(source.spec, layer));
    endings.insert(last_component(layer));
  }
  for (const std::string& module : models::module_names(source.description.parameters)) {
    if (models::is_of_experts(module)) continue;  // parameters there
    if (endings.contains(last_component(module)) &&
        !adapted.contains(in_transformers(source.spec, module))) {
      return {adapted.begin(), adapted.end()};
    }
  }
  return {endings.begin(), endings.end()};
}

/// Products of experts that have an adapter, by the end of their names where that means the same.
std::vector<std::string> adapted_products(const ModelSource& source) {
  std::set<std::string> adapted, endings;
  for (const std::string& layer : source.lora.layers) {
    if (!models::is_of_experts(layer)) continue;
    adapted.insert(in_transformers(source.spec, layer));
    endings.insert(concat("experts.", last_component(layer)));
  }
  for (const auto& row : source.description.parameters) {
    if (!models::is_of_experts(row.name)) continue;
    if (endings.contains(concat("experts.", last_component(row.name))) &&
        !adapted.contains(in_transformers(source.spec, row.name))) {
      return {adapted.begin(), adapted.end()};
    }
  }
  return {endings.begin(), endings.end()};
}

/// Errors: kUsage where peft would refuse the file: its adapters of parameters have no dropout.
std::vector<std::string> target_parameters(const ModelSource& source) {
  std::vector<std::string> names = adapted_products(source);
  for (const std::string& layer : source.lora.layers) {
    if (!is_taken_for_experts(source, layer)) continue;
    TESSERA_CHECK(source.lora.dropout == 0.0, ErrorKind::kUsage, "convert: found lora.dropout ",
                  source.lora.dropout, " with an adapter in ", layer, " of a ",
                  models::traits(source.spec.family).model_type,
                  " model, expected 0: peft takes target_modules of that name for the routed "
                  "experts, and has no dropout where it is listed among target_parameters; write "
                  "the whole model with --merged");
    names.push_back(concat(in_transformers(source.spec, layer), ".weight"));
  }
  return names;
}

/// peft's own field is an integer.
nlohmann::ordered_json number(double value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (value == std::floor(value) && value < kExact) return static_cast<std::int64_t>(value);
  return value;
}

std::string adapter_config(const ModelSource& source) {
  nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                   {"task_type", "CAUSAL_LM"},
                                   {"base_model_name_or_path", source.folder->path().string()},
                                   {"r", source.lora.rank},
                                   {"lora_alpha", number(source.lora.alpha)},
                                   {"lora_dropout", source.lora.dropout},
                                   {"target_modules", target_modules(source)},
                                   {"bias", "none"},
                                   {"fan_in_fan_out", false},
                                   {"inference_mode", true},
                                   {"init_lora_weights", true},
                                   {"modules_to_save", nullptr},
                                   {"use_dora", false},
                                   {"use_rslora", false}};
  const auto parameters = target_parameters(source);
  if (!parameters.empty()) config["target_parameters"] = parameters;
  return config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// scale * B A of one layer after the other, in parts; of a product of experts that of each expert,
/// one below the other, standing as the experts' matrices do. The factors of the matrix that was
/// asked for last are kept.
class Products {
 public:
  explicit Products(const ModelSource& source) : source_(&source) {}

  /// Elements [begin, end) of the layer's.
  at::Tensor operator()(const std::string& layer, std::int64_t begin, std::int64_t end) {
    const auto [rows, columns] = sizes_of(layer);
    const std::int64_t first = begin / columns;
    const std::int64_t last = (end + columns - 1) / columns;
    std::vector<at::Tensor> parts;
    for (std::int64_t row = first; row < last;) {
      const std::int64_t matrix = row / rows;
      const std::int64_t next = std::min(last, (matrix + 1) * rows);
      take(layer, matrix);
      parts.push_back(at::mm(left_.narrow(0, row - matrix * rows, next - row), right_));
      row = next;
    }
    return at::cat(parts)
        .mul_(source_->lora.scale())
        .view({-1})
        .narrow(0, begin - first * columns, end - begin);
  }

 private:
  bool is_in_out(const std::string& layer) const {
    return models::is_of_experts(layer) &&
           source_->spec.moe->layout == models::ExpertLayout::kInOut;
  }

  /// Sizes of a matrix of the layer.
  std::pair<std::int64_t, std::int64_t> sizes_of(const std::string& layer) const {
    const auto& a = source_->adapters->find(models::adapter_a(layer))->shape;
    const auto& b = source_->adapters->find(models::adapter_b(layer))->shape;
    const std::int64_t in = a.back(), out = b[b.size() - 2];
    return is_in_out(layer) ? std::pair(in, out) : std::pair(out, in);
  }

  void take(const std::string& layer, std::int64_t matrix) {
    if (layer == layer_ && matrix == matrix_) return;
    const bool in_out = is_in_out(layer);
    const at::Tensor a = factor(models::adapter_a(layer), matrix);
    const at::Tensor b = factor(models::adapter_b(layer), matrix);
    left_ = in_out ? a.t() : b;
    right_ = in_out ? b.t() : a;
    layer_ = layer;
    matrix_ = matrix;
  }

  at::Tensor factor(const std::string& name, std::int64_t matrix) const {
    const TensorSource& folder = *source_->adapters;
    const auto& shape = folder.find(name)->shape;
    const std::int64_t rows = shape[shape.size() - 2], columns = shape.back();
    const std::int64_t size = rows * columns;
    return read_elements(folder, name, matrix * size, (matrix + 1) * size).view({rows, columns});
  }

  const ModelSource* source_;
  std::string layer_;  ///< that the factors belong to
  std::int64_t matrix_ = 0;
  at::Tensor left_, right_;
};

/// A tensor of peft's file.
struct PeftTensor {
  enum class As : std::uint8_t { kA, kB };
  TensorSpec spec;
  std::string ours;
  As as = As::kA;  ///< of a product of experts
  bool of_experts = false;

  /// Arranges the whole tensor, as it is here, for peft: the experts' A are stacked, [E * rank,
  /// in], and B is [out, rank * E] with the experts innermost.
  at::Tensor arranged(const at::Tensor& whole) const {
    if (!of_experts) return whole;
    const bool is_a = ours == models::adapter_a(layer());
    const at::Tensor by_expert = is_a == (as == As::kA) ? whole : whole.transpose(1, 2);
    return as == As::kA ? by_expert.reshape({-1, by_expert.size(2)})
                        : by_expert.permute({1, 2, 0}).reshape({by_expert.size(1), -1});
  }
  std::string layer() const { return models::adapted_layer(ours); }
};

/// peft wraps a module once a parameter, transformers' order of them from the inside out: where
/// both products of a module's experts have an adapter, that of the first is inside.
std::string module_in_peft(const ModelSource& source, const std::string& layer) {
  const std::string module = layer.substr(0, layer.rfind('.'));
  const std::string second = concat(module, ".down_proj");
  const bool is_inside = layer != second && std::ranges::count(source.lora.layers, second) > 0;
  return concat(in_transformers(source.spec, module), is_inside ? ".base_layer" : "");
}

PeftTensor peft_tensor(const ModelSource& source, const models::ParameterSpec& row, DType dtype) {
  using As = PeftTensor::As;
  PeftTensor result{{concat(kPeftPrefix, in_transformers(source.spec, row.name)), dtype, row.shape},
                    row.name};
  const std::string layer = result.layer();
  if (!models::is_of_experts(layer)) return result;
  const bool is_a = row.name == models::adapter_a(layer);
  const bool swaps = models::traits(source.spec.family).moe_names.peft_swaps_factors;
  result.of_experts = true;
  result.as = is_a != swaps ? As::kA : As::kB;
  const std::string module = module_in_peft(source, layer);
  result.spec.name = concat(
      kPeftPrefix, result.as == As::kA ? models::adapter_a(module) : models::adapter_b(module));
  const at::Tensor sizes = at::empty(row.shape, at::TensorOptions().device(at::kMeta));
  result.spec.shape = result.arranged(sizes).sizes().vec();
  return result;
}

}  // namespace

ExportPlan plan_adapter_export(const ModelSource& source, const ExportOptions& options) {
  TESSERA_INVARIANT(source.adapters != nullptr, "an export of adapters without any");
  check_adapters(source);
  ExportPlan plan;
  plan.dtype = options.dtype;
  HfShard file{.file = "adapter_model.safetensors", .tensors = {}};
  std::map<std::string, PeftTensor> by_name;
  for (const auto& row : source.description.parameters) {
    if (!models::is_adapter(row.name)) continue;
    const DType stored = source.adapters->find(row.name)->dtype;
    const PeftTensor tensor = peft_tensor(source, row, options.dtype.value_or(stored));
    by_name.emplace(tensor.spec.name, tensor);
    file.tensors.push_back(tensor.spec);
    plan.size_bytes += size_bytes(tensor.spec);
  }
  plan.shards.push_back(std::move(file));
  plan.texts["adapter_config.json"] = adapter_config(source);
  verify_weights(*source.adapters);
  plan.read = [&source, by_name = std::move(by_name), last = std::string(), values = at::Tensor()](
                  const std::string& name, std::int64_t begin, std::int64_t end) mutable {
    const PeftTensor& tensor = by_name.at(name);
    if (name != last) {
      const SourceTensor& whole = *source.adapters->find(tensor.ours);
      values =
          tensor
              .arranged(
                  read_elements(*source.adapters, tensor.ours, 0, whole.numel()).view(whole.shape))
              .contiguous()
              .view({-1});
      last = name;
    }
    return values.narrow(0, begin, end - begin);
  };
  return plan;
}

std::function<at::Tensor(const std::string& name, std::int64_t begin, std::int64_t end)>
merged_elements(const ModelSource& source) {
  /// Which elements of a layer's matrices a tensor of the files has.
  struct Place {
    std::string layer;
    std::int64_t first = 0;
  };
  std::map<std::string, Place> places;
  std::map<std::string, std::string> layers;  // by the name of the parameter
  for (const std::string& layer : source.lora.layers) layers[models::adapted_weight(layer)] = layer;
  for (const models::ParameterSpec& row : source.description.parameters) {
    const auto layer = layers.find(row.name);
    if (layer == layers.end()) continue;
    const FileForm form = file_form(row);
    const std::int64_t numel = row.numel() / form.file.count;
    for (std::size_t i = 0; i < form.names.size(); ++i) {
      places[form.names[i]] = {layer->second, static_cast<std::int64_t>(i) * numel};
    }
  }
  return [&source, places, product = Products(source)](const std::string& name, std::int64_t begin,
                                                       std::int64_t end) mutable {
    const at::Tensor base = read_elements(*source.folder, name, begin, end);
    const auto place = places.find(name);
    if (!source.adapters || place == places.end()) return base;
    const auto& [layer, first] = place->second;
    return base.to(at::promote_types(base.scalar_type(), at::kFloat))
        .add_(product(layer, first + begin, first + end));
  };
}

}  // namespace tessera::train
