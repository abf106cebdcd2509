// The costs of a model's units, measured or assumed, from which passes and the simulator work.
// Pure.
//
// Times are of one micro-batch on the slowest rank. A collective costs what was measured of the
// unit, else latency and bytes by a line through what was measured: a gather costs the time of its
// transfer, a reduction what its rank waited for it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/fields.h"
#include "capture/region_blocks.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// The range of every time in a profile.
inline constexpr NumberRange kMs{0.0, 1e9};

struct UnitCost {
  std::string name = {};     ///< of the unit
  double forward_ms = 0.0;   ///< its own, without the units inside it
  double backward_ms = 0.0;  ///< the same, and without its forward where that runs again
  std::optional<double> gather_ms = {};
  std::optional<double> reduce_ms = {};
  std::optional<MeasuredBlocks> blocks = {};  ///< of its regions, where they were replayed
  bool operator==(const UnitCost&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<UnitCost>) {
  visit("name", &UnitCost::name, TextLimit{256});
  visit("forward_ms", &UnitCost::forward_ms, kMs);
  visit("backward_ms", &UnitCost::backward_ms, kMs);
  visit({"gather_ms", Missing::kNull}, &UnitCost::gather_ms, kMs);
  visit({"reduce_ms", Missing::kNull}, &UnitCost::reduce_ms, kMs);
  visit({"blocks", Missing::kLeftOut}, &UnitCost::blocks);
}

/// The share of a layer's forward that is computed again where products of weights are kept: norms,
/// rotations, attention itself, activations. As measured of a dense model
/// (docs/measured/speed_cpu.md: 1.09 times the step compared with 1.28 times); nothing is run to
/// know it better.
inline constexpr double kSelectiveShare = 1.0 / 3.0;
/// Returns the milliseconds that a unit's forward takes again.
double recompute_ms(const UnitCost& unit, RecomputeMode mode);

/// A collective of n bytes takes latency + n x ms_per_byte; one of 0 bytes takes nothing.
struct CollectiveCost {
  double latency_ms = 0.0;
  double ms_per_byte = 0.0;
  double of(std::int64_t bytes) const {
    return bytes == 0 ? 0.0 : latency_ms + ms_per_byte * static_cast<double>(bytes);
  }
  bool operator==(const CollectiveCost&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CollectiveCost>) {
  visit("latency_ms", &CollectiveCost::latency_ms, kMs);
  visit("ms_per_byte", &CollectiveCost::ms_per_byte, NumberRange{0.0, 1.0});
}

struct PlanProfile {
  std::vector<UnitCost> units;  ///< in the order of the plan's
  CollectiveCost collective;
  /// The part of a step outside units, gathers and reductions: the update, small collectives.
  double rest_ms = 0.0;
  /// How long the rank waited for gathers in the measured step; none: unknown.
  std::optional<double> gathers_waited_ms = {};
  /// Whether nothing was measured: see default_profile().
  bool is_assumed = false;
  bool operator==(const PlanProfile&) const = default;

  double gather_ms(const std::vector<fsdp::PlanUnit>& units_of_plan, fsdp::UnitId unit) const;
  double reduce_ms(const std::vector<fsdp::PlanUnit>& units_of_plan, fsdp::UnitId unit) const;
};

template <class V>
constexpr void fields(V& visit, Of<PlanProfile>) {
  visit("collective", &PlanProfile::collective);
  visit({"rest_ms", Missing::kOlder}, &PlanProfile::rest_ms, kMs);
  visit({"gathers_waited_ms", Missing::kLeftOut}, &PlanProfile::gathers_waited_ms, kMs);
  visit("units", &PlanProfile::units, List{1 << 13, "units"});
  visit({"is_assumed", Missing::kNotInFile}, &PlanProfile::is_assumed);
}

/// "0.0123 ms", "4.56 ms", "12.3 s".
std::string ms_text(double ms);

/// Returns the costs that are assumed where nothing was measured: they follow from bytes alone, at
/// a gigabyte a second and 50 us a message; a forward takes four times what its gather takes, a
/// backward twice as long as that. Good for an order of units by size, not for times.
PlanProfile default_profile(const std::vector<fsdp::PlanUnit>& units);

/// One collective that was measured.
struct Measured {
  std::int64_t bytes = 0;
  double ms = 0.0;
};
/// Fits a line by least squares, neither of its numbers below 0. Zero for an empty list.
CollectiveCost fit(std::span<const Measured> measured);

/// Returns what all units compute in one micro-batch.
double computed_ms(const PlanProfile& profile);

/// Returns the profile from which a plan is made, the same on every rank: that of the rank whose
/// units compute longest, as a whole. The others wait for that one, so that the longest of every
/// place would count a step's time and what others waited meanwhile. Blocks of regions are the most
/// of any rank. Errors: kConfig where ranks measured other units.
PlanProfile slowest_of(const std::vector<PlanProfile>& ranks);

/// Returns the costs in the order of `units`. Errors: kConfig naming a unit that the profile lacks.
PlanProfile profile_of(const PlanProfile& profile, const std::vector<fsdp::PlanUnit>& units,
                       std::string_view where);

inline constexpr std::int64_t kMostProfileBytes = std::int64_t{64} << 20;
std::string to_json(const PlanProfile& profile);
/// Errors: kFormat with file and place.
PlanProfile parse_profile(std::string_view text, std::string_view where);

}  // namespace tessera::capture
