#include "models/expert_bias.h"

#include "models/moe_layer.h"
#include "tessera/error.h"

namespace tessera::models {

void add_expert_biases(LanguageModel& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* layer = dynamic_cast<MoeLayer*>(module.get())) layer->add_expert_bias();
  }
}

std::vector<BufferSpec> expert_biases(const ModelSpec& spec) {
  std::vector<BufferSpec> rows;
  if (!spec.moe) return rows;
  const auto model = make_language_model(spec);
  for (const auto& module : model->named_modules("", /*include_self=*/false)) {
    const auto* layer = dynamic_cast<const MoeLayer*>(module.value().get());
    if (layer == nullptr) continue;
    rows.push_back({concat(module.key(), ".", MoeLayer::kExpertBias),
                    {layer->num_experts()},
                    InitKind::kZeros});
  }
  return rows;
}

}  // namespace tessera::models
