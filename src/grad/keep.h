// Which checkpoint this thread is inside of, as keep() sees it (tessera/keep.h).
//
// checkpoint() opens a scope around each run of its function.
// Next: ../fsdp/runtime/recompute_scopes.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/recompute_mode.h"

namespace tessera::grad {

/// How each refusal of a second run that is not as the first one ends.
inline constexpr auto kMakeDeterministic = "; make the checkpointed function deterministic";

/// What keep() was given, as it was then.
struct Kept {
  at::Tensor value;
  std::int64_t version = 0;
};

/// Of one checkpointed forward, in order.
struct KeptResults {
  RecomputeMode mode = RecomputeMode::kFull;
  std::vector<Kept> kept;
  std::size_t next_kept = 0;  ///< in the recomputation
};

enum class CheckpointRun : std::uint8_t { kFirst, kAgain };

/// While alive, keep() on this thread adds to `results`, or takes from them.
class KeepScope {
 public:
  KeepScope(KeptResults& results, CheckpointRun run);
  ~KeepScope();
  KeepScope(const KeepScope&) = delete;
  KeepScope& operator=(const KeepScope&) = delete;

 private:
  CheckpointRun run_;
  KeptResults* outer_;
};

/// Whether this thread runs the function of a checkpoint again.
bool is_recomputing();

/// Of the innermost scope of such a run on this thread, where its mode is selective; else null.
KeptResults* recorded_results(CheckpointRun run);
/// What keep() does there, for a value that was computed elsewhere. Errors: as keep().
at::Tensor next_recorded(at::IntArrayRef sizes);
void add_kept(const at::Tensor& value);

}  // namespace tessera::grad
