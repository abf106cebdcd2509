// One step of a model in which one thing is wrong, and what notices it.
//
// Faults are put in from outside: other contracts or declarations than the layers', hooks on raw
// gradients, stand-ins for transitions and for the sums of numbers over ranks
// (base/test_hooks.h). The library has no switch for them. Each counts how often it acted: a fault
// that never does proves nothing.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "golden/degrees.h"
#include "models/language_model.h"
#include "models/model_spec.h"
#include "nn/attention/masked_attention.h"
#include "nn/context_region.h"
#include "nn/state/state_part.h"
#include "parallel/context_exchange.h"
#include "parallel/transition.h"
#include "train/parallelize.h"
#include "train/step.h"

namespace tessera::golden {

/// In the place of transitions; none = what the transition itself does.
struct StandIn {
  using Way = std::function<at::Tensor(const parallel::Transition&, const at::Tensor&)>;
  StandIn(Way of_forward, Way of_backward)
      : forward(std::move(of_forward)), backward(std::move(of_backward)) {}
  Way forward, backward;
};

/// The same of sums over ranks.
struct SumStandIn {
  using Values = std::vector<std::vector<double>>;  ///< by rank
  using Way = std::function<std::vector<double>(train::RankSum, const Values&)>;
  explicit SumStandIn(Way instead) : way(std::move(instead)) {}
  Way way;
};

/// In the places of context parallelism (base/test_hooks.h); none = nothing is changed.
struct ContextStandIn {
  using Rows = std::shared_ptr<const nn::ContextRows>;
  /// Writes to the tensors of a micro-batch that the rank is about to cut.
  std::function<void(const train::MicroBatch&)> batch = {};
  std::function<Rows(const models::ModelInputs&, const Rows&)> rows = {};
  std::function<void(nn::AttentionMask&, const nn::Documents&)> mask = {};
  std::function<void(const parallel::ContextSite&, std::vector<at::Tensor>&)> exchange = {};
};

/// The parts of a rank before its model is sharded.
struct RankParts {
  const Mesh& mesh;
  train::ModelParts& parts;
  std::vector<std::function<void()>>& after_sharding;
  std::atomic<int>& acted;  ///< of all ranks: how often the fault did something

  void act() const { ++acted; }
};

/// Empty functions change nothing.
struct Changes {
  std::function<void(train::Config&)> config = {};
  /// Changes what config.json says.
  std::function<void(models::ModelSpec&)> spec = {};
  std::function<void(const RankParts&)> parts = {};
  std::function<std::unique_ptr<StandIn>(const RankParts&)> transitions = {};
  std::function<std::unique_ptr<SumStandIn>(const RankParts&)> sums = {};
  std::function<double(const RankParts&, const ShardedBase&)> norm = {};
  /// Changes each micro-batch.
  std::function<void(train::MicroBatch&)> batch = {};
  /// In place of the starts of documents that a part of a layer with a state goes by.
  std::function<at::Tensor(nn::StatePart, const at::Tensor&)> starts = {};
  std::function<ContextStandIn(const RankParts&)> context = {};
};

struct Step {
  std::string refusal;                     ///< of sharding; empty: there was none
  std::string forward_refusal;             ///< of a transition
  std::vector<std::string> not_invariant;  ///< check_invariant_gradients
  int acted = 0;                           ///< how often the fault did, on all ranks
  double loss = 0;
  double auxiliary = 0;  ///< loss
  double norm = 0;
  Tensors gradients;            ///< whole, by the library's names
  std::vector<Tensors> biases;  ///< expert_bias after the step, by rank
};

/// The folder's reference batch, once forward and backward, on thread ranks; of a run that balances
/// its experts their biases are moved as well.
Step run_step(const std::string& folder, const Degrees& degrees, const Changes& changes = {});

// `ending`: of the names of modules, whose own parameters are meant, or of parameters.

/// Replaces what layers declare of parameters.
void declare(const RankParts& rank, std::string_view ending, const ParameterLayout& layout);
/// The same in the contract, with the sums that follow.
void contract(const RankParts& rank, std::string_view ending, const ParameterLayout& layout);
/// Anything else that contracts say.
void on_contracts(const RankParts& rank, std::string_view ending,
                  const std::function<void(GradContract&)>& change);
/// Both: a layer that is wrong about itself.
void place(const RankParts& rank, std::string_view ending, const ParameterLayout& layout);
/// Changes raw gradients of parameters whose names end so, on their way to the sink; an undefined
/// result is no gradient.
void on_raw_gradient(const RankParts& rank, std::string_view ending,
                     const std::function<at::Tensor(const at::Tensor&)>& change);

}  // namespace tessera::golden
