#include "models/language_model.h"

#include "tessera/error.h"

namespace tessera::models {

bool LanguageModel::is_whole() const {
  return stages() == StagesOfRank{{true, {0, spec().num_hidden_layers}, true}};
}

std::shared_ptr<LanguageModel> make_language_model(const ModelSpec& spec, const ModelAxes& axes) {
  switch (spec.family) {
#define TESSERA_FAMILY(enumerator, folder, build) \
  case Family::enumerator:                        \
    return build_##build(spec, axes);
#include "models/families.def"
  }
  TESSERA_INVARIANT(false, "a family that is not listed");
}

}  // namespace tessera::models
