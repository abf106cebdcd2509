// Forecasts the bytes that a rank sends in a step, by kind, from contracts, plans and
// configuration, for any number of ranks: what `inspect --contract` prints, as a value.
//
// The forecast is of steps from the second on, whose forwards enter what the first one entered.
// Control messages (norms, counts, agreements between ranks) and images are left out. Tokens of
// experts are counted by the loads that are given, or as if every expert were chosen equally often.
// Pure: no rank is started and nothing is allocated. tests/unit/train/step_traffic_test.cpp counts
// the bytes of real runs. Next: ../../docs/communication.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/agreed/step_plan.h"
#include "layout/bucket_plan.h"
#include "models/keeps/kept_activations.h"
#include "tessera/mesh_shape.h"
#include "train/plan_of_step.h"

namespace tessera::train {

/// Counts how often the tokens of each rank of axis ep chose each expert, over the micro-batches of
/// a step: for each layer with experts in the order of the model, by rank, by expert.
using ExpertLoads = std::vector<std::vector<std::vector<std::int64_t>>>;

/// The rank whose bytes are forecast.
struct Sender {
  int rank = 0;  ///< of the world; of unequal parts rank 0 has the larger ones
  const ExpertLoads* loads = nullptr;  ///< of its axis ep; null: even
};

struct StepTraffic {
  std::int64_t micro_batches = 1;
  std::int64_t gathers = 0;     ///< of parameters
  std::int64_t reductions = 0;  ///< of gradients, to their shards
  std::int64_t replicas = 0;  ///< sums of gradients over replicas, and over copies on other stages
  /// Bytes that depend on the number of tokens; none where training.seq_len is not known.
  struct OfTokens {
    std::int64_t activations = 0;  ///< over tp
    std::int64_t experts = 0;      ///< over ep: rows there and back, and their counts
    std::int64_t messages = 0;     ///< over pp
    bool is_even = false;          ///< no loads were given
  };
  std::optional<OfTokens> of_tokens = {};

  std::int64_t total() const;
};

/// The traffic of a step outside of a pipeline. `plan`: the one that the steps of `run` follow
/// (plan_of_steps).
StepTraffic step_traffic(const RunOfPlan& run, const fsdp::StepPlan& plan, const Sender& sender);

// The parts of the forecast, for the stages of a pipeline:

/// The bytes of summing a bucket's gradients over their copies, once a step; 0 without copies.
std::int64_t replica_sent_bytes(const layout::BucketPlan& bucket, const MeshShapes& mesh, int rank);

/// One forward of a micro-batch and its backward, as the sender does them.
struct SentForward {
  const models::ModelSpec& spec;
  const models::KeptActivations& kept;   ///< of the sender's tp_rank
  std::int64_t first_layer = 0;          ///< of the stage
  std::span<const RecomputeMode> modes;  ///< by layer from there on
};
/// The bytes of `micro_batches` equal micro-batches, without messages.
StepTraffic::OfTokens sent_of_tokens(const SentForward& forward, std::int64_t micro_batches,
                                     const MeshShapes& mesh, const Sender& sender);

/// Prints a line for each kind, bytes as size_text().
std::string to_string(const StepTraffic& traffic);

}  // namespace tessera::train
