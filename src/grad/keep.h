// The checkpoint that this thread is inside of, for keep() (tessera/keep.h).
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

/// The end of each message about a second run that differs from the first.
inline constexpr auto kMakeDeterministic = "; make the checkpointed function deterministic";

/// A result that keep() has stored, and its version at that time.
struct Kept {
  at::Tensor value;
  std::int64_t version = 0;
};

/// The kept results of one checkpointed forward, in order.
struct KeptResults {
  RecomputeMode mode = RecomputeMode::kFull;
  std::vector<Kept> kept;
  std::size_t next_kept = 0;  ///< index of the next one, in the recomputation
};

enum class CheckpointRun : std::uint8_t { kFirst, kAgain };

/// While alive, keep() on this thread adds to `results` or takes from them.
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

/// Returns the results of the innermost scope of such a run on this thread, where its mode is
/// selective; else null.
KeptResults* kept_results(CheckpointRun run);
/// Take or add the next kept result as keep() does, for a value that was computed elsewhere.
/// Errors: those of keep().
at::Tensor next_kept(at::IntArrayRef sizes);
void add_kept(const at::Tensor& value);

}  // namespace tessera::grad
