// A small run: the model of a configuration in small (small_spec.h), stepped twice on all ranks
// of its layout as threads of this process, with what crosses the borders of units and transitions.
//
// Everything is computed in float32, from weights and tokens that are drawn by a seed and are the
// same under every layout, so that ranks and one rank alone differ by the order of additions. Each
// step has two micro-batches a data rank at least, whose rows are those of the same micro-batches
// of one rank. Next: compare_runs.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/seen_transitions.h"
#include "check/values.h"
#include "layout/parallel_dims.h"
#include "train/config/config.h"
#include "train/data/data.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// A run under one layout, of the small model or of a whole one on a batch.
struct SmallRun {
  Config config;       ///< parallelism and pipeline are those of the layout
  ModelSource source;  ///< without a folder
  ParallelDims dims;
  std::int64_t data_ranks = 1;  ///< whose rows are run, independent of `dims`
  std::int64_t micro_batches = 2;
  std::shared_ptr<const BatchSource> batch = {};  ///< whose rows those are; null: they are drawn
};

/// `dims`: of the whole run. Adapters belong to the same layers, narrow and without dropout.
/// Errors: kConfig where the model cannot be shared so.
SmallRun small_run(const Config& config, const ModelSource& source, const ParallelDims& dims);
/// The model itself and `batch`, as its configuration has them: the micro-batches of `data_ranks`
/// ranks with one row each, also where `dims` has fewer. Errors: kUsage for rows that they do not
/// divide.
SmallRun run_of_batch(const Config& config, const ModelSource& source, const ParallelDims& dims,
                      std::shared_ptr<const BatchSource> batch, std::int64_t data_ranks);
/// The same in float32.
SmallRun in_float32(const SmallRun& run);
/// The same rows and weights under other degrees.
SmallRun under(const SmallRun& run, const ParallelDims& dims);

/// One call of a unit on one rank.
struct SeenUnit {
  std::string unit;
  std::int64_t call = 0;              ///< of this unit, from 0: the micro-batch
  check::Values input = {};           ///< its first floating one
  check::Values result = {};          ///< the first
  check::Values gradient = {};        ///< of the result; empty where none came
  check::Values input_gradient = {};  ///< gradient of the input; empty where none is due
};

struct SeenRank {
  std::vector<check::SeenTransition> transitions;
  std::vector<SeenUnit> units;                  ///< in the order of their calls
  std::vector<std::string> not_invariant;       ///< check_invariant_gradients
  std::map<std::string, check::Values> biases;  ///< that balance experts
};

/// One step of all ranks.
struct SeenStep {
  std::vector<SeenRank> ranks;
  double loss = 0;
  double auxiliary = 0;
  double norm = 0;
  std::int64_t kept = 0;
  std::map<std::string, check::Values> gradients;  ///< whole, by canonical name
};

struct SeenRun {
  std::vector<SeenStep> steps;
  std::string refused;  ///< what the run ended with; empty: it ran
};

/// Runs two steps on threads of this process, which end before it returns; of a batch that is
/// given, one. An error of a rank is in `refused`; every rank's tensors are kept as float64.
SeenRun run_small(const SmallRun& run);

}  // namespace tessera::train
