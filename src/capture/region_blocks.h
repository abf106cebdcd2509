// The memory that replayed regions of a model take while they run and until their backward: counted
// in a run, recorded in its profile, and worked out for a plan. Pure.
//
// A forward leaves what its backward reads in one block of a live entry, in place of what autograd
// would keep; what a forward or a backward needs for itself lies in a scratch block. Units share
// blocks; free blocks stay, in addition to what activations take then. Next: replay/blocks.h (which
// takes them), recompute_pass.h (activations).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/text/fields.h"
#include "fsdp/agreed/step_plan.h"
#include "tessera/recompute_mode.h"

namespace tessera::capture {

/// The most of one unit, of one micro-batch at a time, in bytes.
struct UnitBlocks {
  std::int64_t entries = 0;  ///< what forward leaves for backward
  std::int64_t running = 0;  ///< the same with the scratch of what runs
  bool operator==(const UnitBlocks&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<UnitBlocks>) {
  constexpr IntRange kBytes{0, std::int64_t{1} << 50};
  visit("entries", &UnitBlocks::entries, kBytes);
  visit("running", &UnitBlocks::running, kBytes);
}

/// The blocks of a model.
struct RegionBlocks {
  std::int64_t most = 0;  ///< of all units together, at any time
  std::map<std::string, UnitBlocks> units = {};
};

/// The blocks of a unit as a run measured them, which recomputed it in that mode.
struct MeasuredBlocks {
  RecomputeMode mode = RecomputeMode::kNone;
  UnitBlocks bytes = {};
  bool operator==(const MeasuredBlocks&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<MeasuredBlocks>) {
  visit("recompute", &MeasuredBlocks::mode);
  visit("", &MeasuredBlocks::bytes);  // its fields are among these
}

struct PlanProfile;

/// Adds what a run's step took to the profile of that step. `recomputed`: by unit, in that step.
void add_blocks(PlanProfile& profile, const RegionBlocks& blocks,
                const std::vector<RecomputeMode>& recomputed);

/// Returns the blocks by unit; none where they were not measured.
std::vector<UnitBlocks> blocks_of(const PlanProfile& profile);

/// Returns the most that blocks of a stage take under these modes, by unit, which is what they take
/// from then on: free blocks stay. A unit that runs again leaves nothing before it does.
std::int64_t resident_blocks(const std::vector<UnitBlocks>& blocks, const fsdp::StageRecord& stage,
                             const std::vector<RecomputeMode>& modes);

/// Returns the most that all blocks take under these modes, by unit; none where they were not
/// measured, or one of them in another mode. (`full` runs the program of `none` again: either holds
/// for both.)
std::optional<std::int64_t> most_blocks(const PlanProfile& profile, const fsdp::StepRecord& record,
                                        const std::vector<RecomputeMode>& modes);

}  // namespace tessera::capture
