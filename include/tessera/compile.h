// compile(): chooses when a sharded model's steps gather, keep, free and reduce, for a memory
// budget.
//
// A StepScope that knows its schedule follows a plan: when each unit is gathered and waited for,
// how long it is kept, when it is freed and reduced. compile() chooses a plan by passes, or takes
// one out of a file. Values do not change, except that form 2 adds micro-batches in another order.
// Units that are Recomputable (recompute_mode.h) compute their forward again where the budget has
// no room for their activations. Nothing is compiled to machine code. With kReplay, regions of the
// model (layers or parts of them) are recorded in their first calls, compared with eager calls, and
// then run without autograd in planned memory: the same kernels in the same order. Next:
// step_scope.h; docs/compile.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/recompute_mode.h"

namespace tessera {

class ShardedBase;

/// How the steps of a model run.
enum class CompileMode : std::uint8_t {
  kOff,     ///< by the eager plan
  kPlan,    ///< by a plan that is chosen or given
  kReplay,  ///< by such a plan, with regions replayed
};

/// Options of compile().
struct CompileOptions {
  CompileMode mode = CompileMode::kOff;  ///< how steps run
  /// ZeRO's stage. 3 gathers for each forward and each backward. 2 gathers once a step and reduces
  /// with every micro-batch. 1 gathers once a step and reduces with the last micro-batch. A unit
  /// whose reshard_after_forward is off stays gathered in any form.
  int form = 3;
  /// Bytes that gathered parameters may take on a rank, including activations where `activations`
  /// is given. none = no bound.
  std::optional<std::int64_t> memory_budget = std::nullopt;
  /// Bytes that a forward keeps for its backward; units that it does not name keep nothing. The
  /// pass "recompute" needs it; dry_activations() counts it (dry_run.h).
  std::optional<ForwardActivations> activations = std::nullopt;
  /// The passes "recompute", "keep", "prefetch", in the order in which they choose. none = all that
  /// apply.
  std::optional<std::vector<std::string>> passes = std::nullopt;
  /// A plan as `tessera plan --json` writes it, or the path of a file with one. With a plan nothing
  /// is chosen.
  std::string plan = {};
  /// Costs of the units as JSON, or the path of a file with them. Empty = estimated from bytes.
  std::string profile = {};
  std::int64_t micro_batches = 1;  ///< number in a step, where choices depend on it
};

/// Counts the calls of replayed regions on this rank.
struct ReplayCalls {
  std::int64_t replayed = 0;                  ///< calls that were replayed
  std::int64_t recorded = 0;                  ///< first calls, and those that are compared
  std::map<std::string, std::int64_t> eager;  ///< all other calls, by reason

  /// Returns the calls since `before`.
  ReplayCalls operator-(const ReplayCalls& before) const;
};

/// Returns the calls of `model`, the outermost handle, so far; zeros without kReplay.
ReplayCalls replay_calls(const ShardedBase& model);

/// Sets the plan that step scopes of `model`, the outermost handle, follow from their second step
/// on; kOff restores the eager plan. Call it on every rank with the same options, outside of a
/// step. Regions stay recorded where kReplay is given again. Errors: kConfig, kFormat, kIo for
/// options that contradict each other and for a plan of another model, world, torch or number of
/// micro-batches; kUsage in a step; kConfig, when a step begins, for a budget below the smallest
/// possible one, which the message gives in bytes, and for a plan of another trace.
void compile(const ShardedBase& model, const CompileOptions& options);

}  // namespace tessera
