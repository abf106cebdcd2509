// compile: what a sharded model's steps do with memory and gradients, chosen for a budget.
//
// A StepScope that knows its schedule follows a plan: when each unit is gathered and waited for,
// how long it is kept, when it is given back and reduced. compile() chooses another plan than the
// eager one, by passes, or takes one out of a file. No value changes but where form 2 adds
// micro-batches in another order. Units that are Recomputable (recompute_mode.h) may be told to
// compute their forward again where the budget has no room for what they keep. Nothing is compiled
// to code. With kReplay regions of the model, layers or parts of them, are recorded in their first
// calls, compared with eager ones and from then on run without autograd, in memory that was laid out
// before: the same kernels in the same order. Next: step_scope.h; docs/compile.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/recompute_mode.h"

namespace tessera {

class ShardedBase;

enum class CompileMode : std::uint8_t {
  kOff,     ///< eager plans
  kPlan,    ///< chosen, or given
  kReplay,  ///< the same, and regions are replayed
};

struct CompileOptions {
  CompileMode mode = CompileMode::kOff;
  /// ZeRO's stage: 3 gathers for each forward and each backward, 2 once a step, and reduces with
  /// every micro-batch, 1 once a step, and reduces with the last one. A unit whose
  /// reshard_after_forward is off is kept in any.
  int form = 3;
  /// Bytes that gathered parameters may take on a rank, and with `activations` those, too; none: no
  /// bound.
  std::optional<std::int64_t> memory_budget = std::nullopt;
  /// What a forward leaves for its backward; units that it does not name leave nothing. Without it
  /// the pass "recompute" has nothing to go by. dry_activations() counts it (dry_run.h).
  std::optional<ForwardActivations> activations = std::nullopt;
  /// "recompute", "keep", "prefetch", in the order in which they choose; none: all that apply.
  std::optional<std::vector<std::string>> passes = std::nullopt;
  /// A plan as `tessera plan --json` writes it, or a file with one; then nothing is chosen.
  std::string plan = {};
  /// What units cost, as JSON or a file with it; empty: assumed from their bytes.
  std::string profile = {};
  std::int64_t micro_batches = 1;  ///< of a step, as far as choices depend on it
};

/// Calls of regions so far, on this rank.
struct ReplayCalls {
  std::int64_t replayed = 0;
  std::int64_t recorded = 0;                  ///< the first ones, and those that are compared
  std::map<std::string, std::int64_t> eager;  ///< the others, by the reason

  /// Those since `before`.
  ReplayCalls operator-(const ReplayCalls& before) const;
};

/// Of `model`, the outermost handle; none without kReplay.
ReplayCalls replay_calls(const ShardedBase& model);

/// Step scopes of `model`, the outermost handle, follow such plans from their second step on. With
/// kOff eager ones again. On every rank with the same options; not in a step. Errors: kConfig,
/// kFormat, kIo for options that do not fit together and for what is no plan of this model, world,
/// torch or number of micro-batches; kUsage in a step. When a step begins: kConfig for a budget
/// below the least, with that in bytes, and for a plan of another trace. Regions stay as they were
/// recorded where kReplay is given again.
void compile(const ShardedBase& model, const CompileOptions& options);

}  // namespace tessera
