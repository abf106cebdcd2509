// Batches that memory does not hold: what is certain is refused before anything is loaded, what is
// found later ends with the key that mends it instead of the allocator's words or a signal.
//
// No estimate of what a step takes: a floor, of what every forward of these layers keeps, whatever
// else a step needs. What is refused here can only end by the kernel's hand. Pure. Next:
// ../base/memory_pool.h.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "base/memory_pool.h"
#include "models/model_spec.h"
#include "tessera/contract.h"
#include "tessera/recompute_mode.h"

namespace tessera::train {

/// What a rank has of a step.
struct RowsOfRank {
  std::int64_t rows = 0;         ///< loaded when it begins
  std::int64_t micro_batch = 0;  ///< of them, computed together
  std::int64_t tokens = 0;       ///< of a row
};

/// How a forward runs, as far as it says what is kept.
struct ForwardForm {
  RecomputeMode recompute = RecomputeMode::kNone;
  int tensor_ranks = 1;
  bool sequence_parallel = false;
};

/// Bytes on one rank for each token of a micro-batch at the end of its forward, at least.
struct KeptOfToken {
  double logits = 0;
  double activations = 0;  ///< what layers saved for backward
};

/// Counted is what each layer saves whose input wants a gradient, and of that what every kernel
/// saves: inputs of norms; queries, keys, values, gates of layers that have them in this form. Not
/// experts, latent attention, towers of images, or what trained weights add. No element is narrower
/// than the narrowest compute dtype.
KeptOfToken kept_of_token(const models::ModelSpec& spec,
                          const std::vector<GradContract>& parameters, const ForwardForm& form);

/// What one rank needs at least of its pools, for those that share them.
struct MemoryClaim {
  double micro_batch_bytes = 0;  ///< a micro-batch and what its forward keeps
  double step_bytes = 0;         ///< the same beside all rows of the step
  std::vector<std::string> pools;
  bool operator==(const MemoryClaim&) const = default;
};
MemoryClaim claim_of(const RowsOfRank& rows, const KeptOfToken& kept,
                     const std::vector<MemoryPool>& pools);
std::string encode(const MemoryClaim& claim);
MemoryClaim decode_claim(const std::string& text);

/// `claims`: of all ranks, this one's among them. Errors: kConfig naming the key of what is more
/// than one of this rank's pools has left.
void require_room(const RowsOfRank& rows, const std::vector<MemoryClaim>& claims,
                  const std::vector<MemoryPool>& pools);
/// Whether it is more than any moment could have left.
bool is_beyond(const std::vector<MemoryClaim>& claims, const std::vector<MemoryPool>& pools);

/// Also as libtorch says it, which has no type for it on CPUs.
bool is_out_of_memory(const std::exception& error);
/// kConfig, names the keys.
std::string out_of_memory_text(const RowsOfRank& rows, const std::exception& error);

}  // namespace tessera::train
