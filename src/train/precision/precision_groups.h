// Groups of parameters that a user would write one [[precision.rule]] for, read off the model's own
// description: embedding, norms, attention, MLP, router, experts, head; each over all layers.
//
// Pure. A parameter that computes in the same dtype under every policy (a family's pins, adapters)
// is in no group. Next: precision_search.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "models/description.h"
#include "tessera/contract.h"

namespace tessera::train {

struct PrecisionGroup {
  std::string name;                          ///< "embedding", "norms", "self_attn", "experts"
  std::vector<std::string> match = {};       ///< PrecisionRule::match
  std::vector<std::size_t> parameters = {};  ///< places among the contracts
  std::int64_t numel = 0;                    ///< of the whole model
  std::int64_t trained_numel = 0;
};

/// `wide`, `narrow`: the same model with a rule for all parameters that asks for float32 and
/// bfloat16. The patterns of a group match all its parameters and no parameter of another group. In
/// the order of the model.
std::vector<PrecisionGroup> precision_groups(const std::vector<models::ParameterSpec>& table,
                                             const std::vector<GradContract>& wide,
                                             const std::vector<GradContract>& narrow);

}  // namespace tessera::train
