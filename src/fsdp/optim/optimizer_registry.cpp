// The contents of optimizers.def, without torch (make_optimizer is in optim.cpp).
#include "fsdp/optim/optimizer_registry.h"

#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

struct OptimizerRow {
  std::string_view name;
  double weight_decay;
  double momentum;
  bool elementwise;
};

// In the order of the enumerators.
constexpr OptimizerRow kOptimizers[] = {
#define TESSERA_OPTIMIZER(enumerator, source, name, weight_decay, momentum, states, elementwise) \
  {name, weight_decay, momentum, elementwise},
#include "fsdp/optim/optimizers.def"
};

const OptimizerRow& row_of(OptimizerName name) {
  return kOptimizers[static_cast<std::size_t>(name)];
}

bool takes(OptimizerName name, std::string_view key) {
#define TESSERA_HYPERPARAMETER_OF(enumerator, taken) \
  if (name == OptimizerName::enumerator && key == #taken) return true;
#include "fsdp/optim/optimizers.def"
  return false;
}

}  // namespace

std::string_view name_of(OptimizerName name) { return row_of(name).name; }

double default_weight_decay(OptimizerName name) { return row_of(name).weight_decay; }

double default_momentum(OptimizerName name) { return row_of(name).momentum; }

int kept_states(OptimizerName name, const Hyperparameters& values) {
  switch (name) {
#define TESSERA_OPTIMIZER(enumerator, source, name, weight_decay, momentum, states, ...) \
  case OptimizerName::enumerator:                                                        \
    return states;
#include "fsdp/optim/optimizers.def"
  }
  TESSERA_INVARIANT(false, "an optimizer of no row");
}

bool is_elementwise(OptimizerName name) { return row_of(name).elementwise; }

std::vector<std::string_view> keys_without_effect(OptimizerName name,
                                                  const Hyperparameters& values) {
  const Hyperparameters usual;
  std::vector<std::string_view> keys;
#define TESSERA_HYPERPARAMETER(key, ...) \
  if (values.key != usual.key && !takes(name, #key)) keys.emplace_back(#key);
#include "fsdp/optim/optimizers.def"
  return keys;
}

std::string default_weight_decays() {
  const double usual = kOptimizers[0].weight_decay;
  std::string text = concat(usual);
  for (const OptimizerRow& row : kOptimizers) {
    if (row.weight_decay != usual) text += concat("; ", row.weight_decay, " for ", row.name);
  }
  return text;
}

}  // namespace tessera::fsdp
