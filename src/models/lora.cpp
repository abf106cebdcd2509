#include "models/lora.h"

#include <memory>

#include "nn/linear.h"
#include "tessera/error.h"

namespace tessera::models {

void add_adapters(LanguageModel& model, const LoraSpec& lora) {
  if (!lora) return;
  const auto modules = model.named_modules("", /*include_self=*/false);
  for (const std::string& layer : lora.layers) {
    const auto* module = modules.find(layer);
    const auto linear =
        module == nullptr ? nullptr : std::dynamic_pointer_cast<nn::Linear>(*module);
    TESSERA_INVARIANT(linear != nullptr, layer,
                      " is a linear layer of the table, not of the model");
    linear->add_adapter({lora.rank, lora.scale(), lora.dropout, layer});
  }
}

}  // namespace tessera::models
