#include "capture/recompute_pass.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::PlanUnit;
using fsdp::UnitId;
using Mode = RecomputeMode;

void require_sound(const UnitActivations& unit) {
  const auto least = std::min({unit.none, unit.selective, unit.full});
  const bool is_sound =
      least >= 0 && unit.selective_again >= unit.selective && unit.full_again >= unit.full;
  TESSERA_CHECK(is_sound, ErrorKind::kConfig, "activations of unit ", printable(unit.unit),
                ": found ", unit.none, " bytes in mode none, ", unit.selective, " in selective, ",
                unit.full, " in full, ", unit.selective_again, " and ", unit.full_again,
                " while it is computed again, expected 0 or more, and no less again than kept");
}

/// Returns the modes from the one that keeps least to none, each with more bytes and less time than
/// the one before it: where weights are frozen, products may be more than what is kept without
/// them.
std::vector<Mode> ladder(const UnitActivations& unit) {
  std::vector<Mode> modes;
  if (unit.full < std::min(unit.selective, unit.none)) modes.push_back(Mode::kFull);
  if (unit.selective < unit.none) modes.push_back(Mode::kSelective);
  modes.push_back(Mode::kNone);
  return modes;
}

}  // namespace

ForwardActivations activations_of(const ForwardActivations& given,
                                  const std::vector<PlanUnit>& units) {
  TESSERA_CHECK(given.outside >= 0 && given.after >= 0, ErrorKind::kConfig, "activations: found ",
                given.outside, " bytes outside of units and ", given.after,
                " after them, expected 0 or more");
  std::map<std::string_view, const UnitActivations*> by_name;
  for (const auto& one : given.units) {
    require_sound(one);
    TESSERA_CHECK(by_name.emplace(one.unit, &one).second, ErrorKind::kConfig,
                  "activations: found unit ", printable(one.unit), " twice, expected it once");
  }
  ForwardActivations found{.outside = given.outside, .after = given.after, .units = {}};
  for (const auto& unit : units) {
    const auto one = by_name.find(unit.name);
    found.units.push_back(one == by_name.end() ? UnitActivations{.unit = unit.name} : *one->second);
    if (one != by_name.end()) by_name.erase(one);
  }
  TESSERA_CHECK(by_name.empty(), ErrorKind::kConfig, "activations: found unit ",
                printable(std::string(by_name.begin()->first)), ", expected one of the ",
                units.size(), " units of this model");
  return found;
}

std::int64_t most_activations(const ForwardActivations& of, const fsdp::StepRecord& record,
                              const std::vector<Mode>& modes,
                              const std::vector<UnitBlocks>& blocks) {
  std::int64_t most = 0;
  for (const auto& stage : record.stages) {
    const auto resident = blocks.empty() ? 0 : resident_blocks(blocks, stage, modes);
    std::int64_t kept = of.outside;
    std::int64_t in_use = 0;  // of the blocks
    std::int64_t peak = 0;
    for (const auto& part : stage.parts) {
      for (const auto unit : part.units) {
        const auto& one = of.units.at(unit);
        const auto own = blocks.empty() ? 0 : blocks.at(unit).entries;
        // In its backward the ones after it have been freed.
        peak = std::max(peak, kept + one.in_backward(modes.at(unit)) + resident - in_use - own);
        kept += one.kept(modes.at(unit));
        if (modes.at(unit) == Mode::kNone) in_use += own;
      }
    }
    most = std::max({most, peak, kept + of.after + resident - in_use});
  }
  return most;
}

std::vector<bool> units_to_recompute(const PlanProblem& problem) {
  auto may = may_be_recomputed(problem.record, problem.units);
  // In any order it is unknown how many forwards are kept at once.
  if (problem.order == fsdp::PlanOrder::kAny) may.assign(may.size(), false);
  for (UnitId unit = 0; unit < may.size(); ++unit) {
    if (!problem.activations) may[unit] = false;
    if (!may[unit]) continue;
    may[unit] = ladder(problem.activations->units[unit]).size() > 1;
  }
  return may;
}

Mode least_mode(const UnitActivations& unit) { return ladder(unit).front(); }

std::vector<RecomputeItem> recompute_items(const PlanProblem& problem) {
  const auto may = units_to_recompute(problem);
  std::vector<RecomputeItem> items;
  for (UnitId unit = 0; unit < may.size(); ++unit) {
    if (!may[unit]) continue;
    const auto& of = problem.activations->units[unit];
    const auto& cost = problem.profile.units.at(unit);
    const auto item = [&](Mode from, Mode to) {
      return RecomputeItem{unit, from, to, recompute_ms(cost, from) - recompute_ms(cost, to),
                           of.kept(to) - of.kept(from)};
    };
    const auto modes = ladder(of);
    const auto whole = item(modes.front(), Mode::kNone);
    if (modes.size() == 2) {
      items.push_back(whole);
      continue;
    }
    // The first step and then the next, where the first saves more time a byte; otherwise the first
    // alone is left for budgets that both together do not fit.
    const auto half = item(modes[0], modes[1]);
    const bool is_better = half.per_byte() >= whole.per_byte();
    items.push_back(half);
    items.push_back(is_better ? item(modes[1], Mode::kNone) : whole);
  }
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) {
    return std::tuple(-items[i].per_byte(), -static_cast<std::int64_t>(items[i].unit), i);
  });
  std::vector<RecomputeItem> sorted;
  for (const std::size_t i : order) sorted.push_back(items[i]);
  return sorted;
}

std::string recompute_reason(const PlanProblem& problem, UnitId unit, Mode mode) {
  if (problem.units[unit].recompute_by == fsdp::RecomputeBy::kUser) {
    return "as activation_checkpoint.mode or set_recompute says";
  }
  if (!units_to_recompute(problem)[unit]) return "";
  const auto& of = problem.activations->units[unit];
  const auto& cost = problem.profile.units[unit];
  const bool has_times = !problem.profile.is_assumed;
  if (mode == Mode::kNone) {
    const auto least = least_mode(of);
    return concat("its ", size_text(of.none - of.kept(least)), " of activations fit, ",
                  has_times ? concat(ms_text(recompute_ms(cost, least)), " a micro-batch are saved")
                            : "its forward runs once");
  }
  const auto left =
      concat("leaves ", size_text(of.none - of.kept(mode)), " of activations to others");
  if (has_times) return concat(left, " for ", ms_text(recompute_ms(cost, mode)), " a micro-batch");
  return concat(left, mode == Mode::kFull ? ", its forward runs again"
                                          : ", what is no product of its forward runs again");
}

}  // namespace tessera::capture
