// ContextOfRun: how the ranks of cp compute the attention of the rows that they share, what each of
// them sends and holds for it, and how far its bits depend on the ranks: what `tessera plan` and
// `inspect --contract` print, as a value.
//
// Bytes are counted from the cut and the mask of each layer, for rows of one document: where rows
// are packed, less is reached, and as a rule fewer keys and values travel. Images that are read
// both ways count as text. tests/unit/train/context_of_run_test.cpp compares the bytes with dry
// steps. Pure. Next: dry/step_traffic.h, ../layout/context_cut.h, ../../docs/context.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "tessera/kernels_of.h"
#include "tessera/model_contract.h"
#include "train/config/config.h"

namespace tessera::train {

/// Bytes of all layers with attention, of one micro-batch, on the rank that has most.
struct ContextBytes {
  std::int64_t forward = 0, backward = 0;  ///< sent
  std::int64_t gathered = 0;  ///< keys and values of whole rows while a layer computes, the most
  std::int64_t partials = 0;  ///< addends to their gradients that leave and arrive, the most
  std::int64_t sent() const { return forward + backward; }
  bool operator==(const ContextBytes&) const = default;
};

struct ContextOfRun {
  ParallelDims dims = {};
  std::int64_t positions = 0;                ///< of a row; 0: not known, nor what depends on it
  std::int64_t layers = 0;                   ///< with attention
  std::vector<std::string> placements = {};  ///< "k, v of attention: S(cut) -> R, ..."
  std::string forward_bits = {};             ///< of logits: "as one rank with ...", or bounds
  std::string backward_bits = {};            ///< of gradients of activations
  ContextBytes bytes = {};                   ///< in the form of the run
  /// In the other one; none where that is refused.
  std::optional<ContextBytes> other = {};
  /// Pairs of query and key, of the rank with most over the mean.
  double slowest_over_mean = 1.0;
};

/// Returns none where the rows are neither shared nor cut into parts. Errors: as check_positions().
std::optional<ContextOfRun> context_of_run(const Config& config, const models::ModelSpec& spec,
                                           const ParallelDims& dims, const ModelContract& contract,
                                           KernelsOf kernels);

/// "gather over 2 ranks, 4 parts": all that bits depend on; empty where rows are not cut.
std::string context_text(const ParallelDims& dims);
/// The lines of a lock (grad/contract_lock.h); none where rows are not cut.
std::vector<std::string> context_lock_lines(const ParallelDims& dims);

/// Prints the placements and how far bits depend on the ranks.
std::string contract_text(const ContextOfRun& context);
/// Prints the bytes, the balance and the form that sends less.
std::string costs_text(const ContextOfRun& context);

}  // namespace tessera::train
