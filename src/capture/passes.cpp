#include "capture/passes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "capture/recompute_pass.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::Keep;
using fsdp::PlanChoices;
using fsdp::PlanOrder;
using fsdp::ReduceAt;
using fsdp::StepPlan;
using fsdp::UnitId;

constexpr std::array kOfKeep{Fact::kBudget, Fact::kRepeatedGathers};
constexpr std::array kGivenByKeep{Fact::kKept};
constexpr std::array kAgainstKeep{Fact::kPrefetch};
constexpr std::array<Fact, 0> kNone{};
constexpr std::array kGivenByPrefetch{Fact::kPrefetch};
constexpr std::array kOfRecompute{Fact::kBudget, Fact::kActivations, Fact::kFreeModes};
constexpr std::array kGivenByRecompute{Fact::kRecomputed};
constexpr std::array kAgainstRecompute{Fact::kKept, Fact::kPrefetch};

constexpr std::array<PassRow, 3> kPasses{{
    {"recompute", "keeps activations where that saves most time a byte", kOfRecompute,
     kGivenByRecompute, kAgainstRecompute},
    {"keep", "keeps gathered what saves most time a byte", kOfKeep, kGivenByKeep, kAgainstKeep},
    {"prefetch", "how many units ahead are gathered", kNone, kGivenByPrefetch, kNone},
}};

/// Further ahead nothing was ever won, and each unit ahead takes memory.
constexpr std::size_t kMostAhead = 4;
/// Choices within this share of the best count as equal to it.
constexpr double kAsGood = 1e-3;
/// A smaller gain is no reason to gather otherwise than eager steps do: measured steps vary by as
/// much, and each unit further ahead surely takes memory.
constexpr double kWorthIt = 0.02;

/// Names the fact that a pass lacks, and the remedy; both continue a sentence.
struct Lacking {
  std::string_view what, mend;
};
Lacking lacking_of(Fact fact) {
  switch (fact) {
    case Fact::kBudget:
      return {"compile.memory_budget is not set", "set that"};
    case Fact::kRepeatedGathers:
      return {"no unit is gathered more than once a step",
              "set compile.form = 3 and leave reshard_after_forward on"};
    case Fact::kActivations:
      return {"the bytes of activations are unknown",
              "set training.seq_len, in the library CompileOptions::activations"};
    case Fact::kFreeModes:
      return {"no layer keeps less when it is recomputed and has its mode left to plans",
              "leave activation_checkpoint.mode and set_recompute out, which bind layers"};
    case Fact::kRecomputed:
    case Fact::kKept:
    case Fact::kPrefetch:
      break;  // no pass needs what another one decides
  }
  return {"another pass has not run", "name it before this one"};
}

const PassRow& row_named(const std::string& name) {
  const auto found = std::ranges::find(kPasses, name, &PassRow::name);
  TESSERA_CHECK(found != kPasses.end(), ErrorKind::kConfig, "compile.passes: found ",
                printable(name), ", expected recompute, keep or prefetch",
                name == "offload" ? "; optimizer state is in memory" : "");
  return *found;
}

std::string_view number(Form form) { return form == Form::k1 ? "1" : form == Form::k2 ? "2" : "3"; }

class Chooser {
 public:
  using Names = std::optional<std::vector<std::string>>;
  Chooser(const PlanProblem& problem, const Names& names) : problem_(problem), names_(names) {
    TESSERA_INVARIANT(problem.eager.keep.size() == problem.units.size() &&
                          problem.eager.recompute.size() == problem.units.size(),
                      "eager choices of other units");
    if (names) {
      for (const auto& name : *names) asked_.push_back(&row_named(name));
    } else {
      for (const auto& row : kPasses) asked_.push_back(&row);
    }
  }

  /// Returns the choices of this form that need the least memory.
  PlanChoices least() const {
    auto choices = base();
    if (problem_.form == Form::k3) {
      for (auto& keep : choices.keep) keep = keep == Keep::kUpdate ? keep : Keep::kNot;
    }
    choices.ahead_in_forward = choices.ahead_in_backward = 0;
    if (is_asked("recompute")) forget_what_may_be(choices);
    return choices;
  }
  /// Returns the bytes that the budget bounds.
  std::int64_t peak(const PlanChoices& choices) const {
    return peak_bytes(problem_, plan(choices));
  }

  Chosen choose() {
    begin();
    for (const auto* row : asked_) run(*row, names_.has_value());
    give_recompute_reasons();
    if (problem_.blocks_left_out > 0) {
      chosen_.notes.push_back(concat("idle blocks of replayed regions, up to ",
                                     size_text(problem_.blocks_left_out),
                                     ", come on top of the budget, which has no room for them"));
    }
    if (problem_.profile.is_assumed) {
      chosen_.notes.emplace_back("nothing was measured: choices go by bytes alone");
    }
    return std::move(chosen_);
  }

 private:
  StepPlan plan(const PlanChoices& choices) const {
    return make_plan(problem_.record, problem_.units, choices, problem_.order);
  }
  bool fits(const PlanChoices& choices) const {
    return !problem_.memory_budget || peak(choices) <= *problem_.memory_budget;
  }
  bool is_asked(std::string_view name) const {
    return std::ranges::find(asked_, name, &PassRow::name) != asked_.end();
  }
  /// Sets each free layer to the mode that keeps least.
  void forget_what_may_be(PlanChoices& choices) const {
    const auto may = units_to_recompute(problem_);
    for (UnitId unit = 0; unit < may.size(); ++unit) {
      if (may[unit]) choices.recompute[unit] = least_mode(problem_.activations->units[unit]);
    }
  }
  void give_recompute_reasons() {
    for (UnitId unit = 0; unit < problem_.units.size(); ++unit) {
      const auto mode = chosen_.choices.recompute[unit];
      const bool is_chosen = decided_.contains(Fact::kRecomputed);
      const bool is_told = is_chosen || mode != RecomputeMode::kNone;
      chosen_.recompute_reasons.push_back(is_told ? recompute_reason(problem_, unit, mode) : "");
    }
  }

  /// Returns the form's choices, before any budget.
  PlanChoices base() const {
    auto choices = problem_.eager;
    if (problem_.form == Form::k3) return choices;
    for (auto& keep : choices.keep) keep = Keep::kUpdate;
    if (choices.reduce != ReduceAt::kAsked && problem_.form == Form::k2) {
      choices.reduce = ReduceAt::kEveryBackward;
    }
    return choices;
  }

  /// Takes the form's choices, or the nearest to them that fit.
  void begin() {
    chosen_.choices = base();
    chosen_.keep_reasons.resize(problem_.units.size());
    for (UnitId unit = 0; unit < problem_.units.size(); ++unit) {
      auto& reason = chosen_.keep_reasons[unit];
      if (problem_.eager.keep[unit] == Keep::kUpdate) {
        reason = "its reshard_after_forward is off";
      } else if (problem_.form != Form::k3) {
        reason = concat("form ", number(problem_.form));
      } else if (problem_.eager.keep[unit] == Keep::kBackward) {
        reason = "its backward comes next";
      }
    }
    chosen_.ahead_reason = "as in steps without a plan";
    const bool recomputes = is_asked("recompute") && problem_.memory_budget;
    if (recomputes) forget_what_may_be(chosen_.choices);
    if (fits(chosen_.choices)) return;
    const auto least_choices = least();
    const auto bytes = peak(least_choices);
    TESSERA_CHECK(bytes <= *problem_.memory_budget, ErrorKind::kConfig,
                  "compile.memory_budget: found ", exact_size_text(*problem_.memory_budget),
                  " for gathered parameters", problem_.activations ? " and activations" : "",
                  ", expected at least ", exact_size_text(bytes),
                  ", the least of any plan of form ", number(problem_.form),
                  problem_.form == Form::k3 ? "; raise it" : "; raise it, or set compile.form = 3");
    // Drops one after the other, first what costs least to miss.
    const auto without = [&](const auto& change) {
      if (fits(chosen_.choices)) return;
      change(chosen_.choices);
      chosen_.ahead_reason = "no further fits the budget";
    };
    without([](auto& choices) { choices.ahead_in_backward = 0; });
    without([&](auto& choices) { choices.keep = least_choices.keep; });
    for (UnitId unit = 0; unit < problem_.units.size(); ++unit) {
      if (chosen_.choices.keep[unit] == Keep::kNot) chosen_.keep_reasons[unit].clear();
    }
    if (fits(chosen_.choices)) return;
    auto backward = chosen_.choices;
    backward.ahead_in_backward = problem_.eager.ahead_in_backward;
    backward.ahead_in_forward = 0;
    chosen_.choices.ahead_in_forward = 0;
    if (fits(backward)) chosen_.choices = backward;
  }

  /// Returns the gathers of a whole step, by unit.
  std::vector<std::int64_t> gathers(const PlanChoices& choices) const {
    std::vector<std::int64_t> counts;
    for (const auto& of : counts_of(plan(choices), problem_.micro_batches)) {
      counts.push_back(of.gathers);
    }
    return counts;
  }

  // ------------------------------------------------------------------------------------ the passes

  bool holds(Fact fact) const {
    switch (fact) {
      case Fact::kBudget:
        return problem_.memory_budget.has_value();
      case Fact::kRepeatedGathers:
        return std::ranges::any_of(gathers(base()), [](std::int64_t count) { return count > 1; });
      case Fact::kActivations:
        return problem_.activations.has_value();
      case Fact::kFreeModes:
        return std::ranges::count(units_to_recompute(problem_), true) > 0;
      case Fact::kRecomputed:
      case Fact::kKept:
      case Fact::kPrefetch:
        return decided_.contains(fact);
    }
    return false;
  }

  void run(const PassRow& row, bool is_asked_for) {
    for (const auto fact : row.requires_facts) {
      if (holds(fact)) continue;
      const Lacking lacking = lacking_of(fact);
      TESSERA_CHECK(!is_asked_for, ErrorKind::kConfig, "compile.passes: found ", row.name,
                    " without ", to_string(fact), ", which it needs; ", lacking.mend,
                    ", or leave the pass out");
      chosen_.notes.push_back(concat("pass ", row.name, " is left out, since ", lacking.what));
      return;
    }
    for (const auto fact : row.conflicts) {
      TESSERA_CHECK(!decided_.contains(fact), ErrorKind::kConfig, "compile.passes: found ",
                    row.name, " behind a pass that has decided ", to_string(fact),
                    ", expected it before that one");
    }
    if (row.name == "recompute") recompute();
    if (row.name == "keep") keep();
    if (row.name == "prefetch") prefetch();
    decided_.insert(row.provides.begin(), row.provides.end());
  }

  struct Candidate {
    UnitId unit;
    Keep keep;
    std::int64_t fewer;  ///< gathers a step
    double saves_ms;     ///< a micro-batch
    double per_byte;
  };
  /// "0.8 ms a micro-batch"; without a profile the time of a gather is unknown.
  std::string saved(const Candidate& one) const {
    if (!problem_.profile.is_assumed) return concat(ms_text(one.saves_ms), " a micro-batch");
    const double gathers =
        static_cast<double>(one.fewer) / static_cast<double>(problem_.micro_batches);
    return concat(std::round(gathers * 100.0) / 100.0, gathers == 1.0 ? " gather" : " gathers",
                  " a micro-batch");
  }

  std::vector<Candidate> candidates() const {
    const auto& choices = chosen_.choices;
    const auto before = gathers(choices);
    // How often a unit is gathered does not depend on how long others stay: all at once, then.
    const auto if_all = [&](Keep keep) {
      auto changed = choices;
      for (auto& one : changed.keep) one = std::max(one, keep);
      return gathers(changed);
    };
    const bool has_order = problem_.order == PlanOrder::kOneAfterTheOther;
    const auto to_backward = has_order ? if_all(Keep::kBackward) : before;
    const auto to_update = if_all(Keep::kUpdate);
    std::vector<Candidate> list;
    for (UnitId unit = 0; unit < problem_.units.size(); ++unit) {
      double least_saved = 0.0;
      for (const auto keep : {Keep::kBackward, Keep::kUpdate}) {
        if (keep <= choices.keep[unit]) continue;
        const auto& after = keep == Keep::kBackward ? to_backward : to_update;
        const auto fewer = before[unit] - after[unit];
        const double saves = static_cast<double>(fewer) *
                             problem_.profile.gather_ms(problem_.units, unit) /
                             static_cast<double>(problem_.micro_batches);
        // Longer without fewer gathers is memory for nothing.
        if (fewer <= 0 || saves <= least_saved) continue;
        least_saved = saves;
        const auto bytes = std::max<std::int64_t>(problem_.units[unit].bytes, 1);
        list.push_back({unit, keep, fewer, saves, saves / static_cast<double>(bytes)});
      }
    }
    // Among equals every second unit comes first: the gathers that are left hide behind neighbours
    // that need none. Of these, late units: what they keep from forward to backward is kept
    // shortest.
    std::ranges::sort(list, [](const Candidate& one, const Candidate& other) {
      if (one.per_byte != other.per_byte) return one.per_byte > other.per_byte;
      if (one.unit % 2 != other.unit % 2) return one.unit % 2 > other.unit % 2;
      if (one.unit != other.unit) return one.unit > other.unit;
      return one.keep > other.keep;
    });
    return list;
  }

  /// The pass `keep` competes for the same bytes: its items are taken here to keep the order, and
  /// again in its own turn.
  void recompute() {
    auto choices = chosen_.choices;
    const auto items = recompute_items(problem_);
    const auto gathers_kept = is_asked("keep") ? candidates() : std::vector<Candidate>();
    auto next = gathers_kept.begin();
    const auto take = [&](const auto& change) {
      auto changed = choices;
      change(changed);
      if (fits(changed)) choices = std::move(changed);
    };
    const auto keep_better_than = [&](double per_byte) {
      for (; next != gathers_kept.end() && next->per_byte > per_byte; ++next) {
        if (next->keep <= choices.keep[next->unit]) continue;
        take([&](PlanChoices& changed) { changed.keep[next->unit] = next->keep; });
      }
    };
    for (const auto& item : items) {
      keep_better_than(item.per_byte());
      if (choices.recompute[item.unit] != item.from) continue;
      take([&](PlanChoices& changed) { changed.recompute[item.unit] = item.to; });
    }
    chosen_.choices.recompute = choices.recompute;
  }

  void keep() {
    for (const Candidate& one : candidates()) {
      const UnitId unit = one.unit;
      if (one.keep <= chosen_.choices.keep[unit]) continue;
      auto changed = chosen_.choices;
      changed.keep[unit] = one.keep;
      auto& reason = chosen_.keep_reasons[unit];
      if (!fits(changed)) {
        if (chosen_.choices.keep[unit] == Keep::kNot) {
          reason = concat("to keep it would save ", saved(one), ", but its ",
                          size_text(problem_.units[unit].bytes), " do not fit the budget");
        }
        continue;
      }
      chosen_.choices = changed;
      reason = concat("saves ", saved(one), " for ", size_text(problem_.units[unit].bytes));
    }
  }

  void prefetch() {
    if (problem_.record.stages.size() != 1) {
      chosen_.notes.emplace_back(
          "pass prefetch is left out, since a schedule says in which order a pipeline's stages "
          "come");
      return;
    }
    struct Tried {
      PlanChoices choices;
      double ms;
      std::int64_t bytes;
    };
    std::vector<Tried> tried;
    for (std::size_t forward = 0; forward <= kMostAhead; ++forward) {
      for (std::size_t backward = 0; backward <= kMostAhead; ++backward) {
        auto choices = chosen_.choices;
        choices.ahead_in_forward = forward;
        choices.ahead_in_backward = backward;
        const auto made = plan(choices);
        const auto bytes = peak_bytes(problem_, made);
        if (problem_.memory_budget && bytes > *problem_.memory_budget) continue;
        tried.push_back(
            {choices, simulate(made, problem_.profile, problem_.micro_batches).step_ms, bytes});
      }
    }
    // The choices so far fit, so there is one.
    const double best = std::ranges::min(tried, {}, &Tried::ms).ms;
    const Tried* found = nullptr;
    for (const auto& one : tried) {
      if (one.choices == chosen_.choices && one.ms <= best * (1.0 + kWorthIt)) {
        chosen_.ahead_reason =
            problem_.profile.is_assumed
                ? concat("left as it was: of the ", tried.size(),
                         " choices that fit none is more than 2 % better, judged by bytes")
                : concat("left as it was: a step of ", ms_text(one.ms),
                         ", at most 2 % above the least of ", tried.size(), " that fit");
        return;
      }
    }
    for (const auto& one : tried) {
      if (one.ms > best * (1.0 + kAsGood)) continue;
      if (found == nullptr || one.bytes < found->bytes) found = &one;
    }
    chosen_.choices = found->choices;
    chosen_.ahead_reason =
        problem_.profile.is_assumed
            ? concat("the best of the ", tried.size(), " choices that fit, judged by bytes")
            : concat("a step of ", ms_text(found->ms), ", the least of ", tried.size(),
                     " that fit");
  }

  const PlanProblem& problem_;
  const Names& names_;
  std::vector<const PassRow*> asked_;
  Chosen chosen_;
  std::set<Fact> decided_;
};

}  // namespace

std::string_view to_string(Fact fact) {
  switch (fact) {
    case Fact::kBudget:
      return "compile.memory_budget";
    case Fact::kRepeatedGathers:
      return "units that are gathered more than once a step";
    case Fact::kActivations:
      return "activations that are known";
    case Fact::kFreeModes:
      return "layers that keep less when they are recomputed and whose mode is left to plans";
    case Fact::kRecomputed:
      return "what is recomputed";
    case Fact::kKept:
      return "what is kept";
    case Fact::kPrefetch:
      return "how far ahead is gathered";
  }
  return "";
}

std::span<const PassRow> passes() { return kPasses; }

std::int64_t peak_bytes(const PlanProblem& problem, const StepPlan& plan) {
  auto bytes = fsdp::peak_gathered_bytes(plan);
  if (problem.activations) {
    bytes += most_activations(*problem.activations, problem.record, plan.choices.recompute,
                              problem.blocks);
  }
  return bytes;
}

std::int64_t least_bytes(const PlanProblem& problem,
                         const std::optional<std::vector<std::string>>& names) {
  const Chooser chooser(problem, names);
  return chooser.peak(chooser.least());
}

void check_passes(const std::vector<std::string>& names) {
  std::set<std::string> seen;
  for (const auto& name : names) {
    row_named(name);
    TESSERA_CHECK(seen.insert(name).second, ErrorKind::kConfig, "compile.passes: found ",
                  printable(name), " twice, expected each pass once");
  }
}

Chosen choose(const PlanProblem& problem, const std::optional<std::vector<std::string>>& names) {
  if (names) check_passes(*names);
  return Chooser(problem, names).choose();
}

}  // namespace tessera::capture
