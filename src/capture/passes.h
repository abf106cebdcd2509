// Passes: pure functions on PlanChoices that choose a plan of a step for a budget.
//
// A form (ZeRO's stages 1, 2, 3) is where choices begin; each pass changes some of them, in the
// order in which they are named, greedily and always the same. kPasses declares what a pass
// requires, what it provides to later ones and what it must not follow; this is checked before
// anything is chosen. Choices that a user bound stay: units with reshard_after_forward off are
// kept, units that name what is prefetched name it, layers whose recomputation a user has set have
// that. No pass exceeds the budget, and no pass changes bits: what is gathered, kept and reduced
// when has no effect on values (except form 2 and sync_every_micro_batch, which add micro-batches
// in another order). Next: plan_text.h (a choice with its reasons), plan_profile.h. Source:
// DeepCompile (arXiv 2504.09983), selective unsharding and prefetching; there the first item that
// does not fit ends the pass, here it is skipped.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "capture/plan_profile.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// ZeRO's stages.
enum class Form : std::uint8_t {
  k1 = 1,  ///< gathered once a step, reduced with the last micro-batch
  k2 = 2,  ///< gathered once a step, reduced with every micro-batch
  k3 = 3,  ///< gathered for each forward and each backward
};

/// The facts that all ranks share when a plan is made.
struct PlanProblem {
  fsdp::StepRecord record;
  std::vector<fsdp::PlanUnit> units;
  /// The choices of an eager plan (eager_choices): a unit that it keeps to the update is one that
  /// its user keeps.
  fsdp::PlanChoices eager;
  fsdp::PlanOrder order = fsdp::PlanOrder::kOneAfterTheOther;
  std::int64_t micro_batches = 1;
  Form form = Form::k3;
  /// Bytes of gathered memory, and of activations where these are known; none: no bound.
  std::optional<std::int64_t> memory_budget = {};
  PlanProfile profile;  ///< of `units`
  /// The activations of `units` (recompute_pass.h); none: unknown.
  std::optional<ForwardActivations> activations = {};
  bool replays = false;  ///< CompileMode::kReplay
  /// The blocks of the regions of each unit; empty: unknown.
  std::vector<UnitBlocks> blocks = {};
  /// The bytes of idle blocks that come on top of the budget, where no plan fits with them.
  std::int64_t blocks_left_out = 0;
};

/// A condition that passes require or provide.
enum class Fact : std::uint8_t {
  kBudget,           ///< there is a memory budget
  kRepeatedGathers,  ///< some unit is gathered more than once a step
  kActivations,      ///< what forwards leave for their backwards is known
  kFreeModes,        ///< some layer keeps less when it is recomputed, and no user has set its mode
  kRecomputed,       ///< what is recomputed has been decided
  kKept,             ///< what is kept for how long has been decided
  kPrefetch,         ///< how far ahead has been decided
};
std::string_view to_string(Fact fact);

struct PassRow {
  std::string_view name;
  std::string_view what;
  std::span<const Fact> requires_facts, provides, conflicts;
};
/// The passes in the order in which they run by default.
std::span<const PassRow> passes();

/// Choices and their reasons.
struct Chosen {
  fsdp::PlanChoices choices;
  std::vector<std::string> keep_reasons;       ///< by unit
  std::vector<std::string> recompute_reasons;  ///< the same
  std::string ahead_reason;
  std::vector<std::string> notes;  ///< passes that were left out, costs that were assumed
  bool operator==(const Chosen&) const = default;
};

/// Returns the most that a rank has gathered in a step, plus the most that activations take.
std::int64_t peak_bytes(const PlanProblem& problem, const fsdp::StepPlan& plan);

/// Returns the least peak_bytes() of any choice that these passes can make in this form.
std::int64_t least_bytes(const PlanProblem& problem,
                         const std::optional<std::vector<std::string>>& names = std::nullopt);

/// Chooses by the passes `names`, in order; none: all whose requirements are met. Errors: kConfig
/// for a name that is no pass, for a pass whose requirement is not met or that follows what it
/// conflicts with, and for a budget below the least, with that in bytes.
Chosen choose(const PlanProblem& problem,
              const std::optional<std::vector<std::string>>& names = std::nullopt);
/// Checks the names alone. Errors: as choose().
void check_passes(const std::vector<std::string>& names);

}  // namespace tessera::capture
