#include "models/expert_bias.h"

#include <ATen/ops/zeros.h>

#include "models/language_model.h"
#include "tessera/error.h"

namespace tessera::models {

void HasExpertBias::add_expert_bias(torch::nn::Module& self) {
  TESSERA_INVARIANT(!expert_bias_.defined(), "a second bias on the choice of experts");
  expert_bias_ =
      self.register_buffer(kName, at::zeros({num_experts_}, at::TensorOptions().dtype(at::kFloat)));
}

void add_expert_biases(LanguageModel& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    auto* chooser = dynamic_cast<HasExpertBias*>(module.get());
    if (chooser != nullptr && !chooser->is_stored()) {
      chooser->add_expert_bias(*module);
    }
  }
}

std::vector<BufferSpec> expert_biases(const ModelSpec& spec) {
  std::vector<BufferSpec> rows;
  if (!spec.moe || spec.moe->has_stored_bias()) return rows;
  const auto model = make_language_model(spec);
  for (const auto& module : model->named_modules("", /*include_self=*/false)) {
    const auto* chooser = dynamic_cast<const HasExpertBias*>(module.value().get());
    if (chooser == nullptr) continue;
    rows.push_back({concat(module.key(), ".", HasExpertBias::kName),
                    {chooser->num_experts()},
                    InitKind::kZeros});
  }
  return rows;
}

}  // namespace tessera::models
