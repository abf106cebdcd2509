#include "models/expert_bias.h"

#include <string_view>

#include "models/moe_layer.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::string_view kEnding = ".expert_bias";

}  // namespace

std::vector<BufferSpec> expert_biases(const ModelSpec& spec) {
  std::vector<BufferSpec> rows;
  if (!spec.moe) return rows;
  for (const std::int64_t layer : routed_experts(spec).layers) {
    rows.push_back({concat("model.layers.", layer, ".mlp", kEnding),
                    {spec.moe->num_experts},
                    InitKind::kZeros});
  }
  return rows;
}

void add_expert_biases(LanguageModel& model) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  for (const BufferSpec& bias : expert_biases(model.spec())) {
    const std::string layer = bias.name.substr(0, bias.name.size() - kEnding.size());
    const auto* module = modules.find(layer);
    const auto moe = module == nullptr ? nullptr : std::dynamic_pointer_cast<MoeLayer>(*module);
    TESSERA_INVARIANT(moe != nullptr, layer,
                      " is a layer of experts of the table, not of the model");
    moe->add_expert_bias();
  }
}

}  // namespace tessera::models
