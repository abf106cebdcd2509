// The registry of optimizers: by which name a configuration asks for one, with which numbers, and
// what builds it.
//
// All of it follows from the rows of optimizers.def; nobody else asks which optimizer it is. What
// one keeps in checkpoints it says itself (Optimizer::states()). Pure. Next: optimizers.def,
// tessera/optim.h.
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
/// does not say.
using MatrixForms = std::map<std::string, MatrixForm, std::less<>>;

/// What a configuration says of an optimizer beside its learning rate: each takes what it knows.
struct Hyperparameters {
#define TESSERA_HYPERPARAMETER(key, type, value, ...) type key = value;
#include "fsdp/optim/optimizers.def"
  std::vector<OptimizerRule> rule;
  bool operator==(const Hyperparameters&) const = default;
};

/// "AdamW".
std::string_view name_of(OptimizerName name);
/// Where a configuration has none.
double default_weight_decay(OptimizerName name);
double default_momentum(OptimizerName name);
/// How many tensors it keeps of a parameter at most, each laid out as the shard:
/// Optimizer::states_of() of what make_optimizer gives.
int kept_states(OptimizerName name, const Hyperparameters& values);
/// Whether an update of some elements needs no others.
bool is_elementwise(OptimizerName name);
/// Keys of `values` that are not their defaults and that this optimizer does not have.
std::vector<std::string_view> keys_without_effect(OptimizerName name,
                                                  const Hyperparameters& values);
/// That of the first, and of all that have another: "0.1; 0 for SGD".
std::string default_weight_decays();

/// Over the shards of a handle; which parameters decay stands in their contracts. Rules may match
/// what other stages of a pipeline have. Errors: kUsage for numbers that the optimizer refuses.
std::unique_ptr<Optimizer> make_optimizer(OptimizerName name, const ShardedBase& model, double lr,
                                          const Hyperparameters& values,
                                          const MatrixForms& matrices = {});

// What make_optimizer calls, each defined in the source that its row names; `values` have a
// weight_decay and a momentum.
#define TESSERA_OPTIMIZER(enumerator, source, ...)                               \
  std::unique_ptr<Optimizer> build_##source(const ShardedBase& model, double lr, \
                                            const Hyperparameters& values,       \
                                            const MatrixForms& matrices);
#include "fsdp/optim/optimizers.def"

}  // namespace tessera::fsdp
