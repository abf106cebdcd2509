// Adapters as other programs take them: peft's files, or merged into the model they were trained
// beside. Next: hf_export.h.
#pragma once

#include "train/hf/hf_export.h"

namespace tessera::train {

/// adapter_model.safetensors and adapter_config.json, as peft's `save_pretrained` names them;
/// `source` has adapters and must outlive the plan. Errors: kFormat naming a damaged file.
ExportPlan plan_adapter_export(const ModelSource& source, const ExportOptions& options);

/// Reads the model's elements, in the folder's dtype; of layers with an adapter W + alpha / rank *
/// B A in float32 at least. `source` must outlive the result.
std::function<at::Tensor(const std::string& name, std::int64_t begin, std::int64_t end)>
merged_elements(const ModelSource& source);

}  // namespace tessera::train
