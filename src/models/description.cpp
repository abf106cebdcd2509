#include "models/description.h"

#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "layout/local_part.h"
#include "models/language_model.h"
#include "nn/parameter.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace tessera::models {
namespace {

/// Names of a file's tensors, expert by expert, and the shape of each.
void read_parts(ParameterSpec& row, const std::string& module,
                const std::vector<std::string>& parts) {
  if (parts.empty()) return;
  for (std::int64_t index = 0; index < row.shape.front(); ++index) {
    for (const std::string& part : parts)
      row.stacked.push_back(concat(module, ".", index, ".", part));
  }
  row.stacked_shape.assign(row.shape.begin() + 1, row.shape.end());
  row.stacked_shape.front() /= static_cast<std::int64_t>(parts.size());
}

class Reader {
 public:
  explicit Reader(LanguageModel& model) : model_(model) {
    for (const ModelUnit& unit : model.units()) {
      result_.units.push_back(unit.name);
      for (const at::Tensor& parameter : unit.module->parameters()) {
        unit_of_.emplace(parameter.unsafeGetTensorImpl(), unit.name);
      }
    }
  }

  ModelDescription read() && {
    // The model itself has none: it has modules only.
    for (const auto& module : model_.named_modules("", /*include_self=*/false)) {
      const auto* placed = dynamic_cast<const nn::PlacedModule*>(module.value().get());
      // A module comes before those inside it.
      if (const auto* part = dynamic_cast<const IsModelPart*>(module.value().get())) {
        part_begins_ = module.key() + ".";
        part_ = part->part();
      }
      if (const auto* layer = dynamic_cast<const IsLayer*>(module.value().get())) {
        layer_begins_ = module.key() + ".";
        layer_ = layer->number();
      }
      for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
        TESSERA_INVARIANT(placed != nullptr, module.key(), " does not declare ", parameter.key());
        add(module.key(), parameter.key(), parameter.value(),
            placed->declaration_of(parameter.key()));
      }
      for (const auto& buffer : module.value()->named_buffers(/*recurse=*/false)) {
        add(module.key() + "." + buffer.key(), buffer.value());
      }
    }
    return std::move(result_);
  }

 private:
  void add(const std::string& module, const std::string& name, const at::Tensor& tensor,
           const nn::Declaration& declared) {
    ParameterSpec row;
    row.name = module + "." + name;
    row.layout = declared.layout;
    row.shape = layout::global_shape(row.layout, tensor.sizes().vec(), row.name);
    row.init = declared.init;
    if (row.init == InitKind::kNormal) row.init_std = model_.spec().initializer_range;
    if (row.init == InitKind::kUniform) {
      row.init_std = declared.init_scale / std::sqrt(static_cast<double>(row.shape.back()));
    }
    row.steps = declared.steps;
    row.decay = declared.decay;
    row.fused = declared.fused;
    if (!part_begins_.empty() && row.name.starts_with(part_begins_)) row.part = part_;
    if (!layer_begins_.empty() && row.name.starts_with(layer_begins_)) row.layer = layer_;
    read_parts(row, module, declared.parts);
    const auto unit = unit_of_.find(tensor.unsafeGetTensorImpl());
    if (unit != unit_of_.end()) row.unit = unit->second;
    const auto [owner, is_first] =
        by_storage_.emplace(tensor.storage().unsafeGetStorageImpl(), result_.parameters.size());
    if (!is_first) {
      row.tied_to = result_.parameters[owner->second].name;
      row.decay = result_.parameters[owner->second].decay;
    }
    result_.parameters.push_back(std::move(row));
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const bool ones = tensor.numel() > 0 && tensor.view({-1})[0].item<double>() != 0;
    result_.buffers.push_back(
        {name, tensor.sizes().vec(), ones ? InitKind::kOnes : InitKind::kZeros});
  }

  LanguageModel& model_;
  ModelDescription result_;
  std::map<const c10::TensorImpl*, std::string> unit_of_;
  std::map<const c10::StorageImpl*, std::size_t> by_storage_;  // index of the first that has it
  std::string part_begins_;                                    // of the last module that is one
  ModelPart part_ = ModelPart::kLayers;
  std::string layer_begins_;  // of the last module that is one
  std::int64_t layer_ = 0;
};

/// Returns the axes of a rank without communication: layers only read how many share them.
ModelAxes axes_of(const ParallelDims& degrees) {
  ModelAxes axes;
  axes.degrees = degrees;
  parallel::Axis tensor;
  tensor.name = axis::kTensor;
  tensor.size = degrees.tp;
  axes.tensor = nn::TensorRegion(tensor, degrees.sequence);
  axes.experts.name = axis::kExpert;
  axes.experts.size = degrees.ep;
  return axes;
}

}  // namespace

ModelDescription describe(LanguageModel& model) { return Reader(model).read(); }

ModelDescription describe(const ModelSpec& spec, const LoraSpec& lora,
                          const ParallelDims& degrees) {
  check_degrees(spec, degrees);
  const auto model = make_language_model(spec, axes_of(degrees));
  add_adapters(*model, lora);
  ModelDescription whole = describe(*model);
  std::set<std::int64_t> layers;
  for (const ParameterSpec& row : whole.parameters) {
    if (row.layer) layers.insert(*row.layer);
  }
  TESSERA_INVARIANT(std::ssize(layers) == spec.num_hidden_layers, "found the numbers of ",
                    layers.size(), " layers (IsLayer), expected ", spec.num_hidden_layers);
  return whole;
}

std::set<std::string> module_names(const std::vector<ParameterSpec>& parameters) {
  std::set<std::string> names;
  for (const ParameterSpec& row : parameters) {
    for (std::size_t dot = row.name.rfind('.'); dot != std::string::npos && dot > 0;
         dot = row.name.rfind('.', dot - 1)) {
      names.insert(row.name.substr(0, dot));
    }
  }
  return names;
}

std::int64_t active_numel(const ModelSpec& spec, const ParameterSpec& row) {
  const bool is_head = !row.tied_to.empty();
  if (row.decay == DecayClass::kEmbedding && !is_head) return 0;
  if (row.part == ModelPart::kVision) return 0;
  if (row.part != ModelPart::kExperts) return row.numel();
  const RoutedExperts experts = routed_experts(spec);
  return row.numel() / experts.experts * experts.experts_per_token;
}

std::int64_t total_numel(const std::vector<ParameterSpec>& parameters) {
  std::int64_t total = 0;
  for (const ParameterSpec& row : parameters) {
    if (row.tied_to.empty()) total += row.numel();
  }
  return total;
}

}  // namespace tessera::models
