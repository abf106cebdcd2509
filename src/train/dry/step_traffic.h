// The bytes that a rank sends in a step, by kind, as a dry step of it counts them: what `inspect
// --contract` prints, as a value, for any number of ranks.
//
// Control messages (norms, counts, agreements between ranks) are left out. Experts are chosen
// equally often, or by the loads that the dry step was given.
// tests/unit/train/step_traffic_test.cpp counts the bytes of real runs. Next: dry_step.h,
// ../../../docs/communication.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/model_plan.h"
#include "models/description.h"
#include "tessera/contract.h"
#include "train/config/config.h"
#include "train/dry/dry_step.h"

namespace tessera::train {

struct StepTraffic {
  std::int64_t micro_batches = 1;
  std::int64_t gathers = 0;     ///< of parameters
  std::int64_t reductions = 0;  ///< of gradients, to their shards
  std::int64_t replicas = 0;  ///< sums of gradients over replicas, and over copies on other stages
  /// Bytes of the matrices that Muon steps: to the ranks that step them, and of the results back.
  struct OfMatrices {
    std::int64_t sent = 0;
    std::int64_t most = 0;  ///< sent by any rank of the sender's stage: all step other matrices
  };
  OfMatrices matrices = {};
  /// Bytes that depend on the number of tokens; none where training.seq_len is not known.
  struct OfTokens {
    std::int64_t activations = 0;  ///< over tp
    std::int64_t experts = 0;      ///< over ep: rows there and back, and their counts
    std::int64_t messages = 0;     ///< over pp
    std::int64_t context = 0;      ///< over cp, of attention
  };
  std::optional<OfTokens> of_tokens = {};
  /// Those in which the bytes go, apart from gathers and reductions, by kind.
  struct Messages {
    std::int64_t replicas = 0;
    std::int64_t matrices = 0;
    std::int64_t activations = 0;
    std::int64_t experts = 0;
    std::int64_t stages = 0;
    std::int64_t context = 0;
  };
  Messages messages = {};

  bool has_loads = false;  ///< of experts, by which tokens went; else each was chosen equally often

  std::int64_t total() const;
};

/// `step`: of stepped_config(). Of matrices `most` is what this rank sends.
StepTraffic step_traffic(const Config& config, const DryStep& step);

/// A rank that was stepped, and the configuration of its step.
struct SteppedRank {
  const Config& config;
  int rank;
  const DryStep& step;
  const ExpertLoads& loads;
};
/// step_traffic(), but for attention over cp the bytes of the rank that sends most: the last one,
/// whose keys most others see. It is stepped here. `stepped`: the first rank of cp.
StepTraffic most_traffic(const Config& config, const ModelSource& source, const MeshShapes& mesh,
                         const SteppedRank& stepped);

/// The bytes of an update's matrices where `plan` is that of the sender's stage and `table` has its
/// parameters. Fused weights are divided as optimizer.rule says.
StepTraffic::OfMatrices sent_of_matrices(const Config& config,
                                         const std::vector<models::ParameterSpec>& table,
                                         const std::vector<GradContract>& contracts,
                                         const layout::ModelPlan& plan, int rank);

/// Prints a line for each kind, bytes as size_text().
std::string to_string(const StepTraffic& traffic);

}  // namespace tessera::train
