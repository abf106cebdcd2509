#include "capture/dry/forward_activations.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

/// The last micro-batch's passes of the units.
struct UnitPasses {
  std::vector<DryPass> forwards;  ///< in their order
  std::map<std::string, std::vector<DryPass>> backwards;
  std::int64_t end = 0;  ///< held when the whole forward had ended

  /// Returns the backward of forward `i`, in reverse order; null if it had none.
  const DryPass* backward_of(std::size_t i) const {
    const auto found = backwards.find(forwards[i].unit);
    if (found == backwards.end()) return nullptr;
    const auto later =
        std::count_if(forwards.begin() + static_cast<std::ptrdiff_t>(i) + 1, forwards.end(),
                      [&](const DryPass& one) { return one.unit == forwards[i].unit; });
    const auto& all = found->second;
    return later < std::ssize(all) ? &all[static_cast<std::size_t>(later)] : nullptr;
  }
};

UnitPasses passes_of(const StepMemory& step, const std::set<std::string>& units) {
  UnitPasses found;
  bool is_forward = true, is_whole = false;
  for (const DryPass& pass : step.passes) {
    if (pass.is_forward && (!is_forward || is_whole)) found = {};  // the next micro-batch
    is_forward = pass.is_forward;
    is_whole = is_forward && pass.unit == unit_label("");
    if (is_forward) found.end = pass.after;  // the root's comes last
    if (!units.contains(pass.unit)) continue;
    if (is_forward) {
      found.forwards.push_back(pass);
    } else {
      found.backwards[pass.unit].push_back(pass);
    }
  }
  return found;
}

std::int64_t kept(const DryPass& forward) {
  return std::max<std::int64_t>(0, forward.after - forward.before);
}

class Activations {
 public:
  Activations(const StepMemory& none, const std::set<std::string>& units)
      : idle_(none.idle), units_(units), none_(passes_of(none, units)) {
    std::int64_t held = idle_;
    for (const DryPass& forward : none_.forwards) {
      found_.forward.outside += forward.before - held;
      held = forward.after;
      auto& unit = of(forward.unit);
      unit.none = std::max(unit.none, kept(forward));
    }
    found_.forward.outside = std::max<std::int64_t>(0, found_.forward.outside);
    found_.forward.after = std::max<std::int64_t>(0, none_.end - held);
    found_.passing = std::max<std::int64_t>(0, none.peak - none_.end);
  }

  void add(const StepMemory& step, std::int64_t UnitActivations::* in_mode,
           std::int64_t UnitActivations::* again) {
    const UnitPasses passes = passes_of(step, units_);
    const bool is_alike =
        std::ranges::equal(passes.forwards, none_.forwards, {}, &DryPass::unit, &DryPass::unit);
    TESSERA_CHECK(is_alike, ErrorKind::kUsage, "activations: found ", passes.forwards.size(),
                  " forwards of units in a step that recomputes them, and ", none_.forwards.size(),
                  " in one that does not, expected the same; call units alike in every step");
    std::int64_t before = idle_ + found_.forward.outside + found_.passing;
    for (std::size_t i = 0; i < passes.forwards.size(); ++i) {
      auto& unit = of(passes.forwards[i].unit);
      const std::int64_t left = kept(passes.forwards[i]);
      unit.*in_mode = std::max(unit.*in_mode, left);
      unit.*again = std::max({unit.*again, unit.none, unit.*in_mode});
      const DryPass* backward = passes.backward_of(i);
      if (backward != nullptr) unit.*again = std::max(unit.*again, backward->most - before);
      before += left;
    }
  }

  CountedActivations found() && { return std::move(found_); }

 private:
  UnitActivations& of(const std::string& name) {
    auto& units = found_.forward.units;
    const auto unit = std::ranges::find(units, name, &UnitActivations::unit);
    return unit == units.end() ? units.emplace_back(UnitActivations{.unit = name}) : *unit;
  }

  const std::int64_t idle_;
  const std::set<std::string>& units_;
  const UnitPasses none_;
  CountedActivations found_;
};

}  // namespace

StepMemory outside_pool(std::int64_t between_steps, std::int64_t peak, std::int64_t pool,
                        std::vector<DryPass> passes) {
  return {.idle = between_steps - pool, .peak = peak - pool, .passes = std::move(passes)};
}

CountedActivations counted_activations(const StepsByMode& steps,
                                       const std::set<std::string>& units) {
  Activations activations(steps.none, units);
  activations.add(steps.selective, &UnitActivations::selective, &UnitActivations::selective_again);
  activations.add(steps.full, &UnitActivations::full, &UnitActivations::full_again);
  return std::move(activations).found();
}

std::set<std::string> innermost_units(const std::vector<DryPass>& passes) {
  std::set<std::string> units, others;
  for (const DryPass& pass : passes) {
    if (pass.is_forward) (pass.is_innermost ? units : others).insert(pass.unit);
  }
  for (const auto& one : others) units.erase(one);
  return units;
}

}  // namespace tessera::capture
