#include "train/hf/lora_export.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "models/description.h"
#include "tessera/error.h"
#include "train/hf/weights.h"

namespace tessera::train {
namespace {

/// What peft puts before the names of the model.
constexpr std::string_view kPeftPrefix = "base_model.model.";

std::string last_component(const std::string& name) { return name.substr(name.rfind('.') + 1); }

/// peft matches whole names or their last components: the short form where it means the same.
std::vector<std::string> target_modules(const ModelSource& source) {
  const std::set<std::string> adapted(source.lora.layers.begin(), source.lora.layers.end());
  std::set<std::string> endings;
  for (const std::string& layer : adapted) endings.insert(last_component(layer));
  for (const std::string& module : models::module_names(source.description.parameters)) {
    if (endings.contains(last_component(module)) && !adapted.contains(module)) {
      return {adapted.begin(), adapted.end()};
    }
  }
  return {endings.begin(), endings.end()};
}

/// peft's own field is an integer.
nlohmann::ordered_json number(double value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (value == std::floor(value) && value < kExact) return static_cast<std::int64_t>(value);
  return value;
}

std::string adapter_config(const ModelSource& source) {
  const nlohmann::ordered_json config = {
      {"peft_type", "LORA"},
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
  return config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// scale * B A of one layer after the other, in parts: A is kept while its layer is asked for, of B
/// only the rows of the part are read.
class Products {
 public:
  explicit Products(const ModelSource& source) : source_(&source) {}

  /// Elements [begin, end) of the layer's.
  at::Tensor operator()(const std::string& layer, std::int64_t begin, std::int64_t end) {
    const TensorSource& folder = *source_->adapters;
    const std::int64_t rank = source_->lora.rank;
    if (layer != layer_) {
      const std::string name = models::adapter_a(layer);
      const SourceTensor& tensor = *folder.find(name);
      a_ = read_elements(folder, name, 0, tensor.numel()).view(tensor.shape);
      layer_ = layer;
    }
    const std::int64_t columns = a_.size(1);
    const std::int64_t first = begin / columns;
    const std::int64_t last = (end + columns - 1) / columns;
    const at::Tensor b = read_elements(folder, models::adapter_b(layer), first * rank, last * rank)
                             .view({last - first, rank});
    return at::mm(b, a_)
        .mul_(source_->lora.scale())
        .view({-1})
        .narrow(0, begin - first * columns, end - begin);
  }

 private:
  const ModelSource* source_;
  std::string layer_;  ///< that a_ belongs to
  at::Tensor a_;
};

}  // namespace

ExportPlan plan_adapter_export(const ModelSource& source, const ExportOptions& options) {
  TESSERA_INVARIANT(source.adapters != nullptr, "an export of adapters without any");
  check_adapters(source);
  ExportPlan plan;
  HfShard file{.file = "adapter_model.safetensors", .tensors = {}};
  for (const auto& row : source.description.parameters) {
    if (!models::is_adapter(row.name)) continue;
    const DType stored = source.adapters->find(row.name)->dtype;
    file.tensors.push_back(
        {concat(kPeftPrefix, row.name), options.dtype.value_or(stored), row.shape});
    plan.size_bytes += size_bytes(file.tensors.back());
  }
  plan.shards.push_back(std::move(file));
  plan.texts["adapter_config.json"] = adapter_config(source);
  verify_weights(*source.adapters);
  plan.read = [&source](const std::string& name, std::int64_t begin, std::int64_t end) {
    return read_elements(*source.adapters, name.substr(kPeftPrefix.size()), begin, end);
  };
  return plan;
}

std::function<at::Tensor(const std::string& name, std::int64_t begin, std::int64_t end)>
merged_elements(const ModelSource& source) {
  std::map<std::string, std::string> layers;  // by the name of the weight
  for (const std::string& layer : source.lora.layers) {
    layers[models::adapted_weight(models::adapter_a(layer))] = layer;
  }
  return [&source, layers, product = Products(source)](const std::string& name, std::int64_t begin,
                                                       std::int64_t end) mutable {
    const at::Tensor base = read_elements(*source.folder, name, begin, end);
    const auto layer = layers.find(name);
    if (!source.adapters || layer == layers.end()) return base;
    return base.to(at::promote_types(base.scalar_type(), at::kFloat))
        .add_(product(layer->second, begin, end));
  };
}

}  // namespace tessera::train
