#include "models/language_model.h"

#include "models/decoder.h"
#include "models/gemma4_model.h"

namespace tessera::models {

std::shared_ptr<LanguageModel> make_language_model(const ModelSpec& spec, const ModelAxes& axes) {
  if (spec.family == Family::kGemma4) return std::make_shared<Gemma4Model>(spec, axes);
  return std::make_shared<Decoder>(spec, axes);
}

}  // namespace tessera::models
