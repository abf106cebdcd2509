// Forward and backward of one global batch: what train and gradients have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/language_model.h"
#include "tessera/shard.h"
#include "train/data.h"
#include "train/sampler.h"

namespace tessera::train {

struct BatchLoss {
  double sum = 0;         ///< of the token losses of all data ranks
  std::int64_t kept = 0;  ///< labels that count, of all data ranks
  double mean() const { return sum / static_cast<double>(kept); }
};

/// The same sum of every rank's values, added in rank order. Collective over the data ranks of the
/// mesh.
std::vector<double> sum_over_data(const ShardedBase& model, const std::vector<double>& values);
/// The largest of every rank's values. Collective.
std::vector<double> max_over_data(const ShardedBase& model, const std::vector<double>& values);

enum class Sync : std::uint8_t { kLastMicroBatch, kEveryMicroBatch };

/// Runs all micro-batches; gradients of mean loss stand on the shards afterwards. Collective: every
/// rank passes as many row ranges (empty ones for nothing). `loss_scale` is the model's scaler's, 1
/// without one. Errors: kFormat when no label of the batch is kept.
BatchLoss forward_backward(Sharded<models::LanguageModel>& model, const BatchSource& source,
                           std::int64_t step, const std::vector<RowRange>& rows, Sync sync,
                           double loss_scale);

/// The loss alone; a batch without a kept label adds nothing. Collective.
BatchLoss forward_only(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, const std::vector<RowRange>& rows);

}  // namespace tessera::train
