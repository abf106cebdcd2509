// ModelDescription: what a model is made of, as a value that is read off the model itself, built
// without data.
//
// Layers declare each tensor where they register it (nn/declaration.h); names, order and units are
// those of the modules. Contracts, bucket plans, files and `inspect` go by this. The order is that
// of the modules (embedding, layers, final norm, head). A tied head stands in it, as an alias of
// the embedding, but has no tensor of its own in a checkpoint. Next: parameter_spec.h,
// language_model.h.
#pragma once

#include <string>
#include <vector>

#include "models/lora_table.h"
#include "models/model_degrees.h"
#include "models/parameter_table.h"

namespace tessera::models {

class LanguageModel;

struct ModelDescription {
  std::vector<ParameterSpec> parameters;  ///< an adapter's stand behind those of its layer
  std::vector<BufferSpec> buffers;
  /// Those that are sharded on their own, in the order of forward; what is in none of them belongs
  /// to the root: where the head is tied, embedding and head, and what is too small.
  std::vector<std::string> units;
  bool operator==(const ModelDescription&) const = default;
};

/// Of a model that has just been made, whole or the part of a rank: shapes are the whole's.
ModelDescription describe(LanguageModel& model);

/// Of the model that a rank of these degrees would make: no memory, no other rank is asked. Errors:
/// as check_degrees.
ModelDescription describe(const ModelSpec& spec, const LoraSpec& lora = {},
                          const ModelDegrees& degrees = {});

}  // namespace tessera::models
