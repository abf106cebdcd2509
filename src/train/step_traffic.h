// What a rank sends in a step, in bytes by kind, worked out from contracts, plans and configuration
// for any number of ranks: what `inspect --contract` prints of it, as a value.
//
// It is of steps from the second on, whose forwards enter what the first one entered. Control messages
// (norms, counts, what ranks agree on) are left out, and so are images. Experts' tokens are counted by
// loads that are given, or as if every expert were chosen equally often. Pure: nobody is started and
// nothing is allocated. tests/unit/train/step_traffic_test.cpp counts the bytes of real runs. Next:
// ../../docs/communication.md.
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

/// How often the tokens of each rank of axis ep chose each expert, over the micro-batches of a step:
/// for each layer with experts in the order of the model, by rank, by expert.
using ExpertLoads = std::vector<std::vector<std::vector<std::int64_t>>>;

/// Of which rank.
struct Sender {
  int rank = 0;  ///< of the world; parts that are larger than others are rank 0's
  const ExpertLoads* loads = nullptr;  ///< those of its axis ep; null: even
};

struct StepTraffic {
  std::int64_t micro_batches = 1;
  std::int64_t gathers = 0;     ///< of parameters
  std::int64_t reductions = 0;  ///< of gradients, to their shards
  std::int64_t replicas = 0;  ///< sums of gradients over replicas, and over copies on other stages
  /// None where training.seq_len is not known.
  struct OfTokens {
    std::int64_t activations = 0;  ///< over tp
    std::int64_t experts = 0;      ///< over ep: rows there and back, and their counts
    std::int64_t messages = 0;     ///< over pp
    bool is_even = false;          ///< nobody has said which experts are chosen
  };
  std::optional<OfTokens> of_tokens = {};

  std::int64_t total() const;
};

/// `plan`: what the steps of `run` follow (plan_of_steps). Not of a pipeline.
StepTraffic step_traffic(const RunOfPlan& run, const fsdp::StepPlan& plan, const Sender& sender);

// Its parts, for the stages of a pipeline:

/// Of a bucket's gradients, once a step. 0 where nobody else has the same.
std::int64_t replica_sent_bytes(const layout::BucketPlan& bucket, const MeshShapes& mesh, int rank);

/// One forward of a micro-batch and its backward, as the sender does them.
struct SentForward {
  const models::ModelSpec& spec;
  const models::KeptActivations& kept;   ///< of the sender's tp_rank
  std::int64_t first_layer = 0;          ///< of the stage
  std::span<const RecomputeMode> modes;  ///< by layer from there on
};
/// Over `micro_batches` alike; without messages.
StepTraffic::OfTokens sent_of_tokens(const SentForward& forward, std::int64_t micro_batches,
                                     const MeshShapes& mesh, const Sender& sender);

/// A line a kind, bytes as size_text().
std::string to_string(const StepTraffic& traffic);

}  // namespace tessera::train
