#include "capture/plan_profile.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text/json_fields.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::PlanUnit;
using fsdp::UnitId;

constexpr std::string_view kProfileFormat = "tessera-profile";
constexpr std::int64_t kProfileVersion = 1;

/// Reads and checks what a field alone does not define.
struct ProfileRules {
  template <class Read>
  void read(Read&, RecomputeMode& mode, const JsonCursor& at, AnyValue) const {
    const auto found = from_word<RecomputeMode>(at.text());
    at.require(found.has_value(), "\"none\", \"selective\" or \"full\"");
    mode = *found;
  }
  void check(const JsonCursor& at, const UnitBlocks& bytes) const {
    at.member("running").require(bytes.running >= bytes.entries, "no less than the entries");
  }
  void check(const JsonCursor& at, const PlanProfile& profile) const {
    std::vector<std::string_view> names;
    for (const auto& unit : profile.units) names.push_back(unit.name);
    std::ranges::sort(names);
    at.member("units").require(std::ranges::adjacent_find(names) == names.end(), "each unit once");
  }
};

}  // namespace

double PlanProfile::gather_ms(const std::vector<PlanUnit>& units_of_plan, UnitId unit) const {
  return units.at(unit).gather_ms.value_or(collective.of(units_of_plan.at(unit).bytes));
}

double PlanProfile::reduce_ms(const std::vector<PlanUnit>& units_of_plan, UnitId unit) const {
  return units.at(unit).reduce_ms.value_or(collective.of(units_of_plan.at(unit).bytes));
}

double recompute_ms(const UnitCost& unit, RecomputeMode mode) {
  if (mode == RecomputeMode::kNone) return 0.0;
  return mode == RecomputeMode::kFull ? unit.forward_ms : kSelectiveShare * unit.forward_ms;
}

std::string ms_text(double ms) {
  if (ms >= 1e4) return concat(std::round(ms / 100.0) / 10.0, " s");
  const double rounded = ms < 0.1 ? std::round(ms * 1e4) / 1e4 : std::round(ms * 100.0) / 100.0;
  return concat(rounded, " ms");
}

PlanProfile default_profile(const std::vector<PlanUnit>& units) {
  PlanProfile profile;
  profile.is_assumed = true;
  profile.collective = {.latency_ms = 0.05, .ms_per_byte = 1e-6};
  for (const auto& unit : units) {
    const double moved = profile.collective.ms_per_byte * static_cast<double>(unit.bytes);
    profile.units.push_back(
        {.name = unit.name, .forward_ms = 4.0 * moved, .backward_ms = 8.0 * moved});
  }
  return profile;
}

CollectiveCost fit(std::span<const Measured> measured) {
  if (measured.empty()) return {};
  const auto count = static_cast<double>(measured.size());
  double bytes = 0.0, ms = 0.0;
  for (const auto& one : measured) {
    bytes += static_cast<double>(one.bytes) / count;
    ms += one.ms / count;
  }
  double squares = 0.0, products = 0.0;
  for (const auto& one : measured) {
    const double apart = static_cast<double>(one.bytes) - bytes;
    squares += apart * apart;
    products += apart * (one.ms - ms);
  }
  if (squares == 0.0 || products <= 0.0) return {.latency_ms = std::max(ms, 0.0)};
  const double slope = products / squares;
  const double latency = ms - slope * bytes;
  // Bounds the slope: a line through a few bytes may be as steep as their noise.
  constexpr double kSteepest = 1.0;  // ms a byte
  if (latency >= 0.0) return {.latency_ms = latency, .ms_per_byte = std::min(slope, kSteepest)};
  // Otherwise fit a line through the origin.
  double own_squares = 0.0, own_products = 0.0;
  for (const auto& one : measured) {
    const auto size = static_cast<double>(one.bytes);
    own_squares += size * size;
    own_products += size * one.ms;
  }
  return {.latency_ms = 0.0, .ms_per_byte = std::clamp(own_products / own_squares, 0.0, kSteepest)};
}

double computed_ms(const PlanProfile& profile) {
  double ms = 0.0;
  for (const auto& unit : profile.units) ms += unit.forward_ms + unit.backward_ms;
  return ms;
}

PlanProfile slowest_of(const std::vector<PlanProfile>& ranks) {
  TESSERA_INVARIANT(!ranks.empty(), "the profiles of no rank");
  for (const auto& rank : ranks) {
    const bool same =
        std::ranges::equal(rank.units, ranks.front().units, {}, &UnitCost::name, &UnitCost::name);
    TESSERA_CHECK(same, ErrorKind::kConfig,
                  "profile: found other units on some rank, expected the ",
                  ranks.front().units.size(), " of rank 0");
  }
  PlanProfile slowest = std::ranges::max(ranks, {}, computed_ms);
  for (std::size_t i = 0; i < slowest.units.size(); ++i) {
    auto& most = slowest.units[i].blocks;
    for (const auto& rank : ranks) {
      const auto& blocks = rank.units[i].blocks;
      if (!blocks) continue;
      if (!most) most = blocks;
      most->bytes.entries = std::max(most->bytes.entries, blocks->bytes.entries);
      most->bytes.running = std::max(most->bytes.running, blocks->bytes.running);
    }
  }
  return slowest;
}

PlanProfile profile_of(const PlanProfile& profile, const std::vector<PlanUnit>& units,
                       std::string_view where) {
  std::map<std::string_view, const UnitCost*> costs;
  for (const auto& unit : profile.units) costs.emplace(unit.name, &unit);
  PlanProfile found;
  found.collective = profile.collective;
  found.rest_ms = profile.rest_ms;
  found.gathers_waited_ms = profile.gathers_waited_ms;
  found.is_assumed = profile.is_assumed;
  for (const auto& unit : units) {
    const auto cost = costs.find(unit.name);
    TESSERA_CHECK(cost != costs.end(), ErrorKind::kConfig, where, ": found no costs of unit ",
                  printable(unit.name), ", expected those of each of ", units.size(),
                  " units; measure this model");
    found.units.push_back(*cost->second);
  }
  return found;
}

std::string to_json(const PlanProfile& profile) {
  nlohmann::ordered_json whole = {{"format", kProfileFormat}, {"version", kProfileVersion}};
  JsonWriter(ProfileRules()).add(whole, profile);
  constexpr int kToUnits = 2;
  return json_lines(whole, kToUnits) + "\n";
}

PlanProfile parse_profile(std::string_view text, std::string_view where) {
  TESSERA_CHECK(std::cmp_less_equal(text.size(), kMostProfileBytes), ErrorKind::kFormat, where,
                ": found ", text.size(), " bytes, expected a profile, of at most ",
                kMostProfileBytes);
  const auto value = parse_json_object(text, where, 8);
  const JsonCursor root(value, where, JsonStyle::kData);
  const auto format = root.member("format");
  format.require(format.value() == kProfileFormat, concat("\"", kProfileFormat, "\""));
  const auto version = root.member("version");
  version.require(version.value() == kProfileVersion, concat("version ", kProfileVersion));
  PlanProfile profile;
  ProfileRules rules;
  JsonFieldsReader(rules, OtherKeys::kPassedOver).object(profile, root);
  return profile;
}

}  // namespace tessera::capture
