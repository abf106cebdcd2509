// Counts the memory that a rank holds in one step of a sharded model: the most of it, and what each
// forward and backward of a unit takes and leaves.
//
// The memory is counted where it is taken (dry/memory_count.h), so that steps on fake tensors and
// on real ones are counted alike. Next: forward_activations.h, dry_run.cpp,
// ../../train/dry/dry_step.h.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/trace.h"
#include "dry/memory_count.h"
#include "tessera/shard.h"

namespace tessera::capture {

/// One forward or backward of a unit, by the bytes that the rank held outside its pool.
struct DryPass {
  std::string unit;  ///< unit_label()
  bool is_forward = true;
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::int64_t most = 0;     ///< from its beginning to its end
  bool is_innermost = true;  ///< of a forward: none of another unit lies in it
};

struct CountedStep {
  std::int64_t unsharded = 0;         ///< the most gathered parameters
  std::int64_t between_steps = 0;     ///< all that is held after the step
  std::int64_t peak = 0;              ///< the most that is held in the step, of any kind
  std::vector<DryPass> passes = {};   ///< in the order of their ends
  std::vector<TraceSpan> spans = {};  ///< as a traced step has them
};

/// Runs `step` of `model`, the outermost handle. `count` is of this thread, and made before the
/// model. Errors: those of `step`.
CountedStep counted_step(const ShardedBase& model, dry::MemoryCount& count,
                         const std::function<void()>& step);

}  // namespace tessera::capture
