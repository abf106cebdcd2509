#include "capture/region_blocks.h"

#include <algorithm>

#include "capture/plan_profile.h"

namespace tessera::capture {
namespace {

/// Whether a measurement in one mode holds for the other one.
bool tells_of(RecomputeMode measured, RecomputeMode mode) {
  return measured == mode ||
         (measured != RecomputeMode::kSelective && mode != RecomputeMode::kSelective);
}

}  // namespace

void add_blocks(PlanProfile& profile, const RegionBlocks& blocks,
                const std::vector<RecomputeMode>& recomputed) {
  for (std::size_t i = 0; i < profile.units.size(); ++i) {
    const auto found = blocks.units.find(profile.units[i].name);
    if (found == blocks.units.end() || found->second.running == 0) continue;
    const auto mode = i < recomputed.size() ? recomputed[i] : RecomputeMode::kNone;
    profile.units[i].blocks = MeasuredBlocks{mode, found->second};
  }
}

std::vector<UnitBlocks> blocks_of(const PlanProfile& profile) {
  std::vector<UnitBlocks> blocks;
  for (const auto& unit : profile.units) {
    blocks.push_back(unit.blocks ? unit.blocks->bytes : UnitBlocks{});
  }
  return blocks;
}

std::int64_t resident_blocks(const std::vector<UnitBlocks>& blocks, const fsdp::StageRecord& stage,
                             const std::vector<RecomputeMode>& modes) {
  std::int64_t most = 0, kept = 0;
  for (const auto& part : stage.parts) {
    for (const auto unit : part.units) {
      most = std::max(most, kept + blocks.at(unit).running);
      if (modes.at(unit) == RecomputeMode::kNone) kept += blocks.at(unit).entries;
    }
  }
  return most;
}

std::optional<std::int64_t> most_blocks(const PlanProfile& profile, const fsdp::StepRecord& record,
                                        const std::vector<RecomputeMode>& modes) {
  bool any = false;
  for (std::size_t unit = 0; unit < profile.units.size(); ++unit) {
    const auto& blocks = profile.units[unit].blocks;
    if (blocks && !tells_of(blocks->mode, modes.at(unit))) return std::nullopt;
    any = any || blocks;
  }
  if (!any) return std::nullopt;
  std::int64_t most = 0;
  for (const auto& stage : record.stages) {
    most = std::max(most, resident_blocks(blocks_of(profile), stage, modes));
  }
  return most;
}

}  // namespace tessera::capture
