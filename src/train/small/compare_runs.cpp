#include "train/small/compare_runs.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "layout/context_cut.h"
#include "tessera/error.h"
#include "tessera/mesh_shape.h"
#include "train/contract_of_run.h"
#include "train/plan_of_run.h"

namespace tessera::train {
namespace {

using check::Finding;
using check::FindingKind;
using check::Values;

constexpr auto kMendOfMessages = "look at what is sent between the two, and under which tag";

/// One call of a unit, of all ranks that share its rows: by data rank, those of tp in order.
using Calls = std::vector<std::vector<const SeenUnit*>>;

/// Compares the units of one step.
class Units {
 public:
  Units(const SmallRun& run, const SeenStep& found, const SeenStep& expected)
      : run_(run), mesh_(mesh_shape(run.dims)), found_(found), one_(expected.ranks.front()) {}

  std::vector<Finding> differences() const {
    auto findings = forward();
    if (findings.empty()) findings = backward();
    return findings;
  }

  /// Whether all that comes to the unit from behind is right, so that what is wrong with its
  /// parameters is its own.
  bool is_reached_rightly(const std::string& name) const {
    return std::ranges::all_of(one_.units, [&](const SeenUnit& unit) {
      return unit.unit != name || unit.gradient.sizes.empty() ||
             is_right(unit, &SeenUnit::gradient);
    });
  }

 private:
  using Part = Values SeenUnit::*;

  /// Returns the first place at which results part, in the order of forward.
  std::vector<Finding> forward() const {
    bool before_is_right = true;
    for (const SeenUnit& unit : one_.units) {
      const bool is_handed_on = is_right(unit, &SeenUnit::input);
      if (!is_handed_on && before_is_right) {
        auto found = finding(FindingKind::kForward, unit, unit.unit, &SeenUnit::input, "input");
        if (run_.dims.pp > 1) {
          found.operation = "message to this unit";
          found.axis = axis::kPipeline;
          found.expected = "the result of the unit before it, of the same micro-batch";
          found.mend = kMendOfMessages;
        }
        return {found};
      }
      const bool result = is_right(unit, &SeenUnit::result);
      if (!result && is_handed_on) {
        return {finding(FindingKind::kForward, unit, unit.unit, &SeenUnit::result, "result")};
      }
      before_is_right = result;
    }
    return {};
  }

  /// Returns the same of gradients, in the order of backward.
  std::vector<Finding> backward() const {
    const SeenUnit* after = nullptr;
    for (auto unit = one_.units.rbegin(); unit != one_.units.rend(); ++unit) {
      if (unit->gradient.sizes.empty()) continue;
      if (!is_right(*unit, &SeenUnit::gradient)) {
        const bool is_sent_rightly =
            after != nullptr && is_right(*after, &SeenUnit::input_gradient);
        const std::string& by = after == nullptr ? unit->unit : after->unit;
        auto found =
            finding(FindingKind::kBackward, *unit, by, &SeenUnit::gradient, "gradient of input");
        if (is_sent_rightly && run_.dims.pp > 1) {
          found.operation = "message from this unit";
          found.axis = axis::kPipeline;
          found.expected = "the unit's gradient of the same micro-batch";
          found.mend = kMendOfMessages;
        }
        return {found};
      }
      after = &*unit;
    }
    return {};
  }

  /// Whether the tensor crosses the border with the rows of the micro-batch: a loss does not.
  static bool has_rows(const Values& whole) { return whole.sizes.size() >= 2; }

  bool is_right(const SeenUnit& unit, Part part) const {
    if (!has_rows(unit.*part)) return true;
    const Calls calls = calls_of(unit);
    for (std::size_t data = 0; data < calls.size(); ++data) {
      if (!is_right(calls[data], rows_of(unit.*part, data), part)) return false;
    }
    return true;
  }
  bool is_right(const std::vector<const SeenUnit*>& ranks, const Values& whole, Part part) const {
    const auto all = by_positions(ranks, whole, part);
    return !all.empty() && std::ranges::all_of(all, &OfPositions::is_right);
  }

  /// What ranks of tp have of the same positions, and what these are on one rank.
  struct OfPositions {
    std::vector<Values> parts;
    Values whole;
    bool is_right() const {
      const auto placement = check::placement_of(parts, whole);
      return placement && placement->kind != PlacementKind::kPartial;
    }
  };
  /// Returns one for each rank of cp, in order. `ranks`: those of tp in order, for each of cp.
  std::vector<OfPositions> by_positions(const std::vector<const SeenUnit*>& ranks,
                                        const Values& whole, Part part) const {
    const auto cp = static_cast<std::size_t>(run_.dims.cp);
    std::vector<OfPositions> all;
    if (ranks.empty() || ranks.size() % cp != 0) return all;
    const std::size_t each = ranks.size() / cp;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (i % each == 0) all.push_back({{}, own_positions(whole, static_cast<int>(i / each))});
      all.back().parts.push_back(ranks[i]->*part);
    }
    return all;
  }
  /// The positions [B, n, .] of a rank of cp; what has no positions in dim 1 is whole on all ranks.
  Values own_positions(const Values& whole, int coordinate) const {
    const std::int64_t positions = *run_.config.training.seq_len;
    if (run_.dims.cp == 1 || whole.sizes.size() < 3 || whole.sizes[1] != positions) return whole;
    const auto cut = layout::head_tail(positions, run_.dims.cp, run_.dims.context_parts);
    std::vector<Values> runs;
    for (const layout::Range& run : cut.runs_of(coordinate)) {
      runs.push_back(check::slice(whole, 1, run.begin, run.end));
    }
    return check::join(runs, 1);
  }

  Finding finding(FindingKind kind, const SeenUnit& unit, const std::string& name, Part part,
                  std::string_view what) const {
    Finding finding{.kind = kind, .unit = name};
    const Calls calls = calls_of(unit);
    for (std::size_t data = 0; data < calls.size(); ++data) {
      const Values whole = rows_of(unit.*part, data);
      if (is_right(calls[data], whole, part)) continue;
      if (calls[data].empty()) {
        finding.found = concat("no call on data rank ", data, ", micro-batch ", unit.call);
        break;
      }
      if (const auto other = other_call(unit, calls[data], data, part)) {
        finding.found = concat("the ", what, " of micro-batch ", *other, " on data rank ", data,
                               ", micro-batch ", unit.call);
        break;
      }
      const auto all = by_positions(calls[data], whole, part);
      const auto wrong = std::ranges::find_if_not(all, &OfPositions::is_right);
      if (wrong == all.end()) {
        finding.found = concat("no call on some ranks of data rank ", data);
        break;
      }
      const bool adds = check::placement_of(wrong->parts, wrong->whole).has_value();
      finding.found =
          concat("a ", what, " whose values are ",
                 adds ? "addends that are nowhere summed,"
                      : check::difference_text(wrong->parts.front(), wrong->whole),
                 " on data rank ", data, ", micro-batch ", unit.call,
                 run_.dims.cp > 1 ? concat(", rank ", wrong - all.begin(), " of cp") : "");
      break;
    }
    finding.expected = "the values of one rank: the same on every rank of tp, or cut over them";
    if (run_.dims.cp > 1) finding.expected += "; of each rank of cp those of its positions";
    finding.mend = "look at the transitions of this unit, and at where its parts are joined";
    return finding;
  }

  /// The micro-batch whose values these are, where that is another one.
  std::optional<std::int64_t> other_call(const SeenUnit& unit,
                                         const std::vector<const SeenUnit*>& ranks,
                                         std::size_t data, Part part) const {
    for (const SeenUnit& other : one_.units) {
      if (other.unit != unit.unit || other.call == unit.call || !has_rows(other.*part)) continue;
      if (is_right(ranks, rows_of(other.*part, data), part)) return other.call;
    }
    return std::nullopt;
  }

  /// Rows of a micro-batch of one rank that data rank `data` has.
  Values rows_of(const Values& whole, std::size_t data) const {
    const std::int64_t each = whole.sizes.front() / run_.dims.data_ranks();
    const auto begin = static_cast<std::int64_t>(data) * each;
    return check::slice(whole, 0, begin, begin + each);
  }

  /// Finds the call on each rank that runs the unit's stage.
  Calls calls_of(const SeenUnit& unit) const {
    Calls calls(static_cast<std::size_t>(run_.dims.data_ranks()));
    for (std::size_t rank = 0; rank < found_.ranks.size(); ++rank) {
      const auto& units = found_.ranks[rank].units;
      const auto place = std::ranges::find_if(units, [&](const SeenUnit& other) {
        return other.unit == unit.unit && other.call == unit.call;
      });
      if (place == units.end()) continue;  // another stage's
      const auto at = static_cast<int>(rank);
      const int data = mesh_.coordinate(at, axis::kReplicate) * run_.dims.dp_shard +
                       mesh_.coordinate(at, axis::kShard);
      calls[static_cast<std::size_t>(data)].push_back(&*place);
    }
    return calls;
  }

  const SmallRun& run_;
  const MeshShapes mesh_;
  const SeenStep& found_;
  const SeenRank& one_;
};

std::string unit_of_parameter(const SmallRun& run, const std::string& name) {
  for (const auto& parameter : run.source.description.parameters) {
    if (parameter.name == name) return parameter.unit;
  }
  return {};
}

/// Makes findings of the names that check_invariant_gradients returns.
std::vector<Finding> not_invariant(const SeenStep& step) {
  std::vector<Finding> findings;
  std::set<std::string> known;
  for (const SeenRank& rank : step.ranks) {
    for (const std::string& name : rank.not_invariant) {
      if (!known.insert(name).second) continue;
      findings.push_back(
          {.kind = FindingKind::kInvariance,
           .parameter = name,
           .found = "gradients that differ between ranks",
           .expected = "the gradient that its layer declares I: the same on all ranks",
           .mend = "declare it partial (AxisPlacement::partial), or sum it where it "
                   "is computed"});
    }
  }
  return findings;
}

std::vector<Finding> wrong_gradients(const SmallRun& run, const SeenStep& found,
                                     const SeenStep& expected, const Units& units) {
  std::vector<Finding> findings;
  for (const auto& [name, gradient] : expected.gradients) {
    const std::string unit = unit_of_parameter(run, name);
    const auto own = found.gradients.find(name);
    Finding finding{.kind = FindingKind::kGradient,
                    .unit = unit,
                    .parameter = name,
                    .expected = "the gradient of one rank",
                    .mend =
                        "look at what its layer declares of it, and at the sums that its "
                        "contract has (tessera inspect --contract)"};
    if (own == found.gradients.end()) {
      finding.found = "no gradient";
    } else if (!check::equal(own->second, gradient)) {
      finding.found = check::difference_text(own->second, gradient);
    } else {
      continue;
    }
    if (unit.empty() || units.is_reached_rightly(unit)) findings.push_back(std::move(finding));
  }
  for (const auto& [name, gradient] : found.gradients) {
    if (expected.gradients.contains(name)) continue;
    findings.push_back({.kind = FindingKind::kGradient,
                        .unit = unit_of_parameter(run, name),
                        .parameter = name,
                        .found = "a gradient",
                        .expected = "none, as on one rank",
                        .mend = "look at which ranks use the parameter"});
  }
  return findings;
}

std::optional<Finding> wrong_number(std::string_view what, double found, double expected) {
  constexpr double kMost = 1e-4;
  if (std::abs(found - expected) <= kMost * std::abs(expected)) return std::nullopt;
  return Finding{.kind = FindingKind::kNumber,
                 .operation = std::string(what),
                 .found = concat(found),
                 .expected = concat(expected, ", as on one rank"),
                 .mend = "look at the sum of it over ranks (train/step.h)"};
}

std::vector<Finding> wrong_numbers(const SeenStep& found, const SeenStep& expected, bool is_norm) {
  std::vector<Finding> findings;
  const auto add = [&](std::optional<Finding> one) {
    if (one) findings.push_back(std::move(*one));
  };
  add(wrong_number("number of labels", static_cast<double>(found.kept),
                   static_cast<double>(expected.kept)));
  add(wrong_number("loss", found.loss, expected.loss));
  add(wrong_number("auxiliary loss", found.auxiliary, expected.auxiliary));
  if (is_norm) add(wrong_number("gradient norm", found.norm, expected.norm));
  for (const auto& [name, bias] : expected.ranks.front().biases) {
    for (std::size_t rank = 0; rank < found.ranks.size(); ++rank) {
      const auto own = found.ranks[rank].biases.find(name);
      if (own == found.ranks[rank].biases.end() || own->second.numbers == bias.numbers) continue;
      findings.push_back({.kind = FindingKind::kNumber,
                          .operation = "expert bias",
                          .parameter = name,
                          .found = concat("another bias on rank ", rank),
                          .expected = "the bias of one rank: counts of all data ranks",
                          .mend = "look at the sum of the counts over ranks (train/step.h)"});
      break;
    }
  }
  return findings;
}

std::vector<Finding> of_transitions(const SeenStep& found) {
  std::vector<std::vector<check::SeenTransition>> transitions;
  for (const SeenRank& rank : found.ranks) transitions.push_back(rank.transitions);
  return check::wrong_transitions(transitions);
}

std::vector<Finding> of_step(const SmallRun& run, const SeenStep& found, const SeenStep& expected) {
  std::vector<Finding> findings;
  check::append(findings, of_transitions(found));
  check::append(findings, not_invariant(found));
  const Units units(run, found, expected);
  check::append(findings, units.differences());
  const bool forward_is_wrong = std::ranges::any_of(
      findings, [](const Finding& one) { return one.kind == FindingKind::kForward; });
  if (!forward_is_wrong) check::append(findings, wrong_gradients(run, found, expected, units));
  const bool gradients_are_right = findings.empty();
  check::append(findings, wrong_numbers(found, expected, gradients_are_right));
  return findings;
}

/// The axes of several ranks, each alone with what it needs, where the rows of the run can be cut
/// so.
std::vector<std::pair<std::string, ParallelDims>> axes_alone(const SmallRun& run) {
  const ParallelDims& dims = run.dims;
  const auto half_of = [](int degree) { return degree % 2 == 0 ? 2 : degree; };
  ParallelDims one = dims;
  one.pp = one.dp_replicate = one.dp_shard = one.cp = one.tp = one.ep = one.etp = 1;
  std::vector<std::pair<std::string, ParallelDims>> all;
  const auto add = [&](std::string_view name, const std::function<void(ParallelDims&)>& set) {
    ParallelDims alone = one;
    set(alone);
    if (run.data_ranks % alone.data_ranks() != 0) return;
    if (alone != one && alone != dims) all.emplace_back(name, alone);
  };
  add(axis::kReplicate, [&](ParallelDims& d) { d.dp_replicate = dims.dp_replicate; });
  add(axis::kShard, [&](ParallelDims& d) { d.dp_shard = half_of(dims.dp_shard); });
  add(axis::kContext, [&](ParallelDims& d) { d.cp = dims.cp; });
  add(axis::kTensor, [&](ParallelDims& d) { d.tp = dims.tp; });
  add(axis::kPipeline, [&](ParallelDims& d) { d.pp = dims.pp; });
  if (dims.ep > 1) {
    const bool is_of_data = run.data_ranks % 2 == 0;  // else experts lie on the ranks of tp
    add(axis::kExpert, [&](ParallelDims& d) {
      d.ep = half_of(dims.ep);
      (is_of_data ? d.dp_shard : d.tp) = is_of_data ? d.ep : dims.tp;
    });
  }
  if (dims.etp > 1) add(axis::kExpertTensor, [&](ParallelDims& d) { d.tp = d.etp = dims.tp; });
  return all;
}

/// Returns the same for findings of two layouts that are the same one.
std::string key_of(const Finding& finding) {
  return concat(to_string(finding.kind), '|', finding.operation, '|', finding.parameter, '|',
                finding.parameter.empty() ? finding.unit : "");
}

/// Names the axis of findings that have none, by runs of each axis alone.
void name_axes(const SmallRun& run, const SeenRun& one, std::vector<Finding>& findings) {
  const bool all_named =
      std::ranges::all_of(findings, [](const Finding& each) { return !each.axis.empty(); });
  if (all_named) return;
  std::map<std::string, std::string> axis_of;
  std::string together;
  for (const auto& [name, dims] : axes_alone(run)) {
    together += concat(together.empty() ? "" : " x ", name);
    const SmallRun alone = under(run, dims);
    for (const Finding& finding : differences(alone, run_small(alone), one)) {
      axis_of.emplace(key_of(finding), name);
    }
  }
  if (together.empty()) {
    const auto& d = run.dims;
    together = d.pp > 1         ? axis::kPipeline
               : d.cp > 1       ? axis::kContext
               : d.tp > 1       ? axis::kTensor
               : d.dp_shard > 1 ? axis::kShard
                                : axis::kReplicate;
  }
  for (Finding& finding : findings) {
    if (!finding.axis.empty()) continue;
    const auto found = axis_of.find(key_of(finding));
    finding.axis = found == axis_of.end() ? together : found->second;
  }
}

}  // namespace

std::vector<Finding> differences(const SmallRun& run, const SeenRun& found,
                                 const SeenRun& expected) {
  if (!found.refused.empty()) {
    // The transitions that it came to may say why.
    auto findings = of_transitions(found.steps.front());
    findings.push_back({.kind = FindingKind::kRefused,
                        .found = found.refused,
                        .expected = "a step of the model in small, as one rank runs it"});
    return findings;
  }
  for (std::size_t step = 0; step < found.steps.size(); ++step) {
    auto findings = of_step(run, found.steps[step], expected.steps[step]);
    if (!findings.empty()) return findings;
  }
  return {};
}

SmallComparison compare_in_small(const SmallRun& run) {
  const ParallelDims alone{.sequence = run.dims.sequence, .router = run.dims.router};
  const SeenRun one = run_small(under(run, alone));
  if (!one.refused.empty()) {
    return {.findings = {{.kind = FindingKind::kRefused,
                          .found = one.refused,
                          .expected = "a step of one rank, which layouts are compared with"}}};
  }
  if (run.dims.world_size() == 1) return {};
  SmallComparison compared{.findings = differences(run, run_small(run), one),
                           .gradients = std::ssize(one.steps.front().gradients)};
  if (!compared.findings.empty()) name_axes(run, one, compared.findings);
  return compared;
}

}  // namespace tessera::train
