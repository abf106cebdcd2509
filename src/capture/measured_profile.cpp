#include "capture/measured_profile.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using Ms = std::chrono::duration<double, std::milli>;

double length_of(const TraceSpan& span) { return Ms(span.end - span.begin).count(); }

/// The unit whose computation a span is, and its pass; none for other spans.
struct Computed {
  std::string unit;
  bool is_forward = true;
};
std::optional<Computed> computed_by(const TraceSpan& span) {
  if (span.row != TraceRow::kCompute) return std::nullopt;
  const std::string_view name = span.name;
  // Longest first: a forward that runs again is a part of the backward.
  for (const std::string_view pass : {"forward again ", "forward ", "backward "}) {
    if (!name.starts_with(pass)) continue;
    return Computed{std::string(unit_label(name.substr(pass.size()))), pass == "forward "};
  }
  return std::nullopt;
}

/// Sums the milliseconds of each unit without the units inside it.
class Own {
 public:
  /// Adds the spans of one thread.
  void add_all(const std::vector<TraceSpan>& spans) {
    // A span that never ended lasts until all end, and encloses what came after it.
    std::vector<TraceSpan> list = nested(spans);
    std::vector<const TraceSpan*> sorted;
    for (const auto& span : list) {
      if (computed_by(span) || span.row == TraceRow::kWaits) sorted.push_back(&span);
    }
    std::ranges::sort(sorted, [](const TraceSpan* a, const TraceSpan* b) {
      return std::tie(a->begin, b->end, a) < std::tie(b->begin, a->end, b);
    });
    std::vector<const TraceSpan*> around;
    for (const auto* span : sorted) {
      while (!around.empty() && around.back()->end < span->end) around.pop_back();
      if (!around.empty()) add(*around.back(), -length_of(*span));
      if (const auto of = computed_by(*span)) {
        add(*span, length_of(*span));
        around.push_back(span);
      }
    }
  }
  double all() const {
    double sum = 0.0;
    for (const auto& [of, ms] : ms_) sum += std::max(ms, 0.0);
    return sum;
  }
  double of(const std::string& unit, bool is_forward) const {
    const auto found = ms_.find({unit, is_forward});
    return found == ms_.end() ? 0.0 : std::max(found->second, 0.0);
  }

 private:
  void add(const TraceSpan& to, double ms) {
    const auto of = computed_by(to);
    ms_[{of->unit, of->is_forward}] += ms;
  }
  std::map<std::pair<std::string, bool>, double> ms_;
};

std::optional<double> shortest(const std::vector<TraceSpan>& spans, TraceRow row,
                               const std::string& unit) {
  std::optional<double> least;
  for (const auto& span : spans) {
    if (span.row != row || span.name != unit) continue;
    least = least ? std::min(*least, length_of(span)) : length_of(span);
  }
  return least;
}

double waited_ms(const TraceSpan& span) {
  for (const auto& [name, value] : span.arguments) {
    if (name == "waited_ms") return std::get<double>(value);
  }
  return length_of(span);
}

/// Returns how long its rank waited for a collective of this row and unit, on average.
std::optional<double> mean_wait(const std::vector<TraceSpan>& spans, TraceRow row,
                                const std::string& unit) {
  double sum = 0.0, count = 0.0;
  for (const auto& span : spans) {
    if (span.row != row || span.name != unit) continue;
    sum += waited_ms(span);
    count += 1.0;
  }
  return count > 0.0 ? std::optional(sum / count) : std::nullopt;
}

std::optional<double> waited_for_gathers(const std::vector<TraceSpan>& spans) {
  std::optional<double> ms;
  for (const auto& span : spans) {
    if (span.row == TraceRow::kGathers) ms = ms.value_or(0.0) + waited_ms(span);
  }
  return ms;
}

/// Gives units of as many bytes the same time, their median: to choose between them by their times
/// in one step would be to choose by noise.
void level_gathers(std::vector<UnitCost>& costs, const std::vector<fsdp::PlanUnit>& units) {
  std::map<std::int64_t, std::vector<double>> by_bytes;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (costs[i].gather_ms) by_bytes[units[i].bytes].push_back(*costs[i].gather_ms);
  }
  for (auto& [bytes, list] : by_bytes) {
    std::ranges::nth_element(list, list.begin() + static_cast<std::ptrdiff_t>(list.size() / 2));
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto alike = by_bytes.find(units[i].bytes);
    if (costs[i].gather_ms) costs[i].gather_ms = alike->second[alike->second.size() / 2];
  }
}

/// The rest of a trace that spans its step; else 0.
double rest_of_step(const std::vector<TraceSpan>& spans, double computed_ms) {
  double rest = -computed_ms;
  bool is_whole = false;
  for (const auto& span : spans) {
    const bool is_step = span.row == TraceRow::kCompute && span.name.starts_with("step ");
    if (is_step) rest += length_of(span);
    is_whole = is_whole || is_step;
    const bool is_planned = span.row == TraceRow::kGathers || span.row == TraceRow::kReductions;
    if (is_planned) rest -= waited_ms(span);
  }
  return is_whole ? std::max(rest, 0.0) : 0.0;
}

}  // namespace

PlanProfile measured_profile(const std::vector<TraceSpan>& spans,
                             const std::vector<fsdp::PlanUnit>& units, std::int64_t micro_batches,
                             const std::vector<RecomputeMode>& recomputed) {
  TESSERA_INVARIANT(micro_batches > 0, "a step without micro-batches");
  Own own;
  own.add_all(spans);
  const auto mean = [&](double ms) { return ms / static_cast<double>(micro_batches); };
  PlanProfile profile;
  std::vector<Measured> gathers;
  for (const auto& unit : units) {
    UnitCost cost{.name = unit.name,
                  .forward_ms = mean(own.of(unit.name, true)),
                  .backward_ms = mean(own.of(unit.name, false)),
                  .gather_ms = shortest(spans, TraceRow::kGathers, unit.name),
                  .reduce_ms = mean_wait(spans, TraceRow::kReductions, unit.name)};
    const auto number = profile.units.size();
    if (number < recomputed.size()) {
      const double again = recompute_ms(cost, recomputed[number]);
      cost.backward_ms = std::max(0.0, cost.backward_ms - again);
    }
    profile.units.push_back(std::move(cost));
  }
  level_gathers(profile.units, units);
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto& ms = profile.units[i].gather_ms;
    if (ms) gathers.push_back({units[i].bytes, *ms});
  }
  profile.collective = fit(gathers);
  profile.rest_ms = rest_of_step(spans, own.all());
  profile.gathers_waited_ms = waited_for_gathers(spans);
  return profile;
}

}  // namespace tessera::capture
