#include "train/precision/precision_search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr double kMostError = 1e6;  // squares of what is not finite are added, too

double square_of(double error) {
  const double finite = std::isfinite(error) ? std::min(error, kMostError) : kMostError;
  return finite * finite;
}

class Search {
 public:
  Search(const PolicyProblem& problem, const Measure& measure)
      : problem_(problem),
        measure_(measure),
        held_(held_parameters(problem.table, problem.bound)),
        noise_(noise_of(problem.table)) {
    const std::size_t groups = problem.table.groups();
    known_[WideGroups(groups, false)] = problem.table.narrow;
    for (std::size_t g = 0; g < groups; ++g) {
      WideGroups alone(groups, false);
      alone[g] = true;
      WideGroups others(groups, true);
      others[g] = false;
      known_.emplace(std::move(alone), problem.table.widened[g]);
      known_.emplace(std::move(others), problem.table.narrowed[g]);
    }
    known_[WideGroups(groups, true)] = ParameterErrors(problem.table.narrow.size(), 0.0);
  }

  FoundPolicy run() {
    WideGroups allowed(problem_.table.groups(), true);
    FoundPolicy found = *cheapest_of(allowed);
    // A group whose effect is noise is left out, if others do without it.
    while (true) {
      const auto before = allowed;
      for (const auto& needed : found.needed) {
        if (needed.is_within_noise) allowed[needed.group] = false;
      }
      if (allowed == before) return found;
      auto other = cheapest_of(allowed);
      if (!other || other->is_all_wide()) return found;
      found = std::move(*other);
    }
  }

 private:
  static WideGroups without_group(WideGroups wide, std::size_t group) {
    wide[group] = false;
    return wide;
  }

  const ParameterErrors& errors_of(const WideGroups& wide) {
    const auto found = known_.find(wide);
    if (found != known_.end()) return found->second;
    auto errors = measure_(wide);
    TESSERA_INVARIANT(errors.size() == held_.size(), "errors of another number of parameters");
    return known_.emplace(wide, std::move(errors)).first->second;
  }

  bool is_within(const ParameterErrors& errors) const {
    return worst_error(errors, held_).error <= problem_.bound;
  }
  /// Whether no error that is above the bound without a group has moved by more than noise.
  bool is_noise(const ParameterErrors& with, const ParameterErrors& without) const {
    for (std::size_t p = 0; p < with.size(); ++p) {
      if (!held_[p] || without[p] <= problem_.bound) continue;
      if (!(without[p] - with[p] <= noise_[p])) return false;
    }
    return true;
  }

  /// None where even all of the allowed groups are not enough.
  std::optional<FoundPolicy> cheapest_of(const WideGroups& allowed) {
    WideGroups wide = widened(allowed);
    if (!is_within(errors_of(wide))) return std::nullopt;
    narrow_again(wide);
    FoundPolicy found{.wide = wide, .errors = errors_of(wide), .needed = {}};
    for (std::size_t g = 0; g < wide.size(); ++g) {
      if (!wide[g]) continue;
      const auto& without = errors_of(without_group(wide, g));
      found.needed.push_back({g, worst_error(without, held_), is_noise(found.errors, without)});
    }
    return found;
  }

  WideGroups widened(const WideGroups& allowed) {
    WideGroups wide(problem_.table.groups(), false);
    while (!is_within(errors_of(wide)) && wide != allowed) {
      const auto next = group_to_widen(wide, allowed);
      if (!next) return allowed;
      wide[*next] = true;
    }
    return wide;
  }

  /// None where no group has an effect.
  std::optional<std::size_t> group_to_widen(const WideGroups& wide, const WideGroups& allowed) {
    const bool is_first = std::ranges::count(wide, true) == 0;
    for (const bool as_measured : {true, false}) {
      if (as_measured && !is_first) continue;
      std::optional<std::size_t> best;
      double most = 0;
      for (std::size_t g = 0; g < wide.size(); ++g) {
        if (wide[g] || !allowed[g]) continue;
        const double gain = as_measured ? measured_gain(g) : expected_gain(wide, g);
        const double by_byte =
            gain / static_cast<double>(std::max<std::int64_t>(1, problem_.costs[g]));
        if (by_byte <= most) continue;
        best = g;
        most = by_byte;
      }
      if (best) return best;
    }
    return std::nullopt;
  }

  /// How far the squares of the held errors exceed the square of the bound.
  double excess(double square) const { return std::max(0.0, square - square_of(problem_.bound)); }

  double measured_gain(std::size_t group) const {
    const auto& table = problem_.table;
    double gain = 0;
    for (std::size_t p = 0; p < held_.size(); ++p) {
      if (!held_[p]) continue;
      const double before = square_of(table.narrow[p]);
      const double after = square_of(table.widened[group][p] + noise_[p]);
      if (after < before) gain += excess(before) - excess(after);
    }
    return gain;
  }

  /// Roundings of different groups add up as squares do: each group has the share in a square that
  /// it has where it is narrow alone.
  double expected_gain(const WideGroups& wide, std::size_t group) {
    const auto& errors = errors_of(wide);
    double gain = 0;
    for (std::size_t p = 0; p < held_.size(); ++p) {
      if (!held_[p]) continue;
      double all = 0;
      for (std::size_t g = 0; g < wide.size(); ++g) all += wide[g] ? 0.0 : part_of(g, p);
      if (all == 0) continue;
      const double before = square_of(errors[p]);
      gain += excess(before) - excess(before * (1.0 - part_of(group, p) / all));
    }
    return gain;
  }
  double part_of(std::size_t group, std::size_t parameter) const {
    const double error = problem_.table.narrowed[group][parameter];
    return error <= problem_.table.wide_noise[parameter] ? 0.0 : square_of(error);
  }

  void narrow_again(WideGroups& wide) {
    std::vector<std::pair<std::int64_t, std::size_t>> order;
    for (std::size_t g = 0; g < wide.size(); ++g) order.emplace_back(-problem_.costs[g], g);
    std::ranges::sort(order);
    bool is_changed = true;
    while (is_changed) {
      is_changed = false;
      for (const auto& [cost, g] : order) {
        if (!wide[g]) continue;
        auto without = without_group(wide, g);
        if (!is_within(errors_of(without))) continue;
        wide = std::move(without);
        is_changed = true;
      }
    }
  }

  const PolicyProblem& problem_;
  const Measure& measure_;
  const std::vector<bool> held_;
  const ParameterErrors noise_;
  std::map<WideGroups, ParameterErrors> known_;
};

}  // namespace

std::vector<bool> held_parameters(const ErrorTable& table, double bound) {
  std::vector<bool> held;
  for (const double noise : table.wide_noise) held.push_back(noise <= bound);
  return held;
}

ParameterErrors noise_of(const ErrorTable& table) {
  ParameterErrors noise = table.narrow_noise;
  for (const auto& errors : table.widened) {
    for (std::size_t p = 0; p < noise.size(); ++p) {
      const double grown = errors[p] - table.narrow[p];
      if (grown > noise[p]) noise[p] = grown;
    }
  }
  return noise;
}

WorstError worst_error(const ParameterErrors& errors, const std::vector<bool>& held) {
  WorstError worst;
  for (std::size_t p = 0; p < errors.size(); ++p) {
    if (!held[p] || errors[p] <= worst.error) continue;
    worst = {p, errors[p]};
  }
  return worst;
}

bool FoundPolicy::is_all_wide() const {
  return std::ranges::all_of(wide, [](bool is_wide) { return is_wide; });
}

FoundPolicy cheapest_policy(const PolicyProblem& problem, const Measure& measure) {
  return Search(problem, measure).run();
}

std::vector<bool> narrow_wires(const ParameterErrors& errors, const ParameterErrors& wire,
                               const std::vector<std::vector<std::size_t>>& groups,
                               const std::vector<bool>& held, double bound) {
  std::vector<bool> narrow;
  for (const auto& parameters : groups) {
    narrow.push_back(std::ranges::all_of(parameters, [&](std::size_t p) {
      return !held[p] || square_of(errors[p]) + square_of(wire[p]) <= square_of(bound);
    }));
  }
  return narrow;
}

}  // namespace tessera::train
