// The registry of optimizers: the names and numbers that a configuration gives them, and what
// builds them.
//
// Everything here follows from the rows of optimizers.def; no other code depends on which optimizer
// it is. An optimizer itself says what it keeps in checkpoints (Optimizer::states()). Pure. Next:
// optimizers.def, tessera/optim.h.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/fused_matrices.h"
#include "layout/local_part.h"
#include "tessera/muon.h"
#include "tessera/optimizer_rule.h"

namespace tessera {
class Optimizer;
class ShardedBase;
}  // namespace tessera

namespace tessera::fsdp {

enum class OptimizerName : std::uint8_t {
#define TESSERA_OPTIMIZER(enumerator, ...) enumerator,
#include "fsdp/optim/optimizers.def"
};

using Betas = std::array<double, 2>;
using Coefficients = std::array<double, 3>;

/// The shape of a parameter as consecutive matrices, each of which Muon gathers whole.
struct MatrixForm : layout::FileShape {
  /// The parts of each of these matrices that are orthogonalized alone.
  layout::FusedMatrices fused = {};
};
/// The parameters of a model that are hidden matrices, by canonical name. Empty where the model
/// does not name them.
using MatrixForms = std::map<std::string, MatrixForm, std::less<>>;

/// The numbers of an optimizer in a configuration, apart from its learning rate. Each optimizer
/// uses those that it has.
struct Hyperparameters {
#define TESSERA_HYPERPARAMETER(key, type, value, ...) type key = value;
#include "fsdp/optim/optimizers.def"
  std::vector<OptimizerRule> rule;
  bool operator==(const Hyperparameters&) const = default;
};

/// "AdamW".
std::string_view name_of(OptimizerName name);
/// Return the values that count where a configuration has none.
double default_weight_decay(OptimizerName name);
double default_momentum(OptimizerName name);
/// Returns the largest number of tensors that it keeps for a parameter, each laid out as the shard:
/// Optimizer::states_of() of the optimizer that make_optimizer returns.
int kept_states(OptimizerName name, const Hyperparameters& values);
/// Whether an update of an element needs no other elements.
bool is_elementwise(OptimizerName name);
/// Returns the keys of `values` that are not at their defaults and that this optimizer does not
/// have.
std::vector<std::string_view> keys_without_effect(OptimizerName name,
                                                  const Hyperparameters& values);
/// Returns the default of the first optimizer, and those that differ: "0.1; 0 for SGD".
std::string default_weight_decays();

/// Makes an optimizer for the shards of a handle. Contracts say which parameters decay. Rules may
/// match parameters of other stages of a pipeline. Errors: kUsage for numbers that the optimizer
/// refuses.
std::unique_ptr<Optimizer> make_optimizer(OptimizerName name, const ShardedBase& model, double lr,
                                          const Hyperparameters& values,
                                          const MatrixForms& matrices = {});

// The functions that make_optimizer calls, each defined in the source that its row names; `values`
// have a weight_decay and a momentum.
#define TESSERA_OPTIMIZER(enumerator, source, ...)                               \
  std::unique_ptr<Optimizer> build_##source(const ShardedBase& model, double lr, \
                                            const Hyperparameters& values,       \
                                            const MatrixForms& matrices);
#include "fsdp/optim/optimizers.def"

}  // namespace tessera::fsdp
