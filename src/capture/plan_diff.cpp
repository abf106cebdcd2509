#include "capture/plan_diff.h"

#include <algorithm>

#include "base/text/printable.h"
#include "capture/plan_words.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::PassPlan;
using fsdp::PlanUnit;
using fsdp::StageRecord;
using fsdp::StepPlan;
using fsdp::UnitId;

const char* yes_or_no(bool value) { return value ? "yes" : "no"; }

class Diff {
 public:
  Diff(const StepPlan& before, const StepPlan& after) : before_(before), after_(after) {}

  std::vector<std::string> lines() {
    value("order of micro-batches", word_of(kOrderWords, before_.order),
          word_of(kOrderWords, after_.order));
    units();
    choices();
    record();
    stages();
    return std::move(lines_);
  }

 private:
  template <class T>
  void value(const std::string& what, const T& before, const T& after) {
    if (before != after) lines_.push_back(concat(what, ": ", before, ", ", after));
  }

  static std::string name(const StepPlan& plan, UnitId unit) {
    return unit < plan.units.size() ? plan.units[unit].name : concat("unit ", unit);
  }
  static std::string names(const StepPlan& plan, const std::vector<UnitId>& units) {
    std::vector<std::string> found;
    for (const auto unit : units) found.push_back(name(plan, unit));
    return joined(found, "none");
  }

  void units() {
    value("units", before_.units.size(), after_.units.size());
    for (std::size_t i = 0; i < std::min(before_.units.size(), after_.units.size()); ++i) {
      const auto& before = before_.units[i];
      const auto& after = after_.units[i];
      const auto of = [&](const char* what) { return concat("unit ", before.name, ", ", what); };
      value(concat("unit ", i), before.name, after.name);
      value(of("bytes"), before.bytes, after.bytes);
      const auto flag = [&](const char* what, bool PlanUnit::* member) {
        value<std::string>(of(what), yes_or_no(before.*member), yes_or_no(after.*member));
      };
      flag("gathers", &PlanUnit::gathers);
      flag("gathers in backward", &PlanUnit::gathers_in_backward);
      flag("is gathered when the step begins", &PlanUnit::gathered);
      flag("reduces", &PlanUnit::reduces);
      value(of("recomputed by"), word_of(kRecomputeByWords, before.recompute_by),
            word_of(kRecomputeByWords, after.recompute_by));
      const auto list = [&](const char* what, std::vector<UnitId> PlanUnit::* member) {
        if (before.*member == after.*member) return;
        lines_.push_back(concat(of(what), ": ", names(before_, before.*member), "; ",
                                names(after_, after.*member)));
      };
      list("lenders", &PlanUnit::lenders);
      list("prefetch in forward", &PlanUnit::forward_prefetch);
      list("prefetch in backward", &PlanUnit::backward_prefetch);
    }
  }

  void choices() {
    const auto& before = before_.choices;
    const auto& after = after_.choices;
    value("choices of units", before.keep.size(), after.keep.size());
    for (std::size_t i = 0; i < std::min(before.keep.size(), after.keep.size()); ++i) {
      value(concat("unit ", name(before_, static_cast<UnitId>(i)), ", kept until"),
            word_of(kKeepWords, before.keep[i]), word_of(kKeepWords, after.keep[i]));
    }
    value("recompute modes", before.recompute.size(), after.recompute.size());
    for (std::size_t i = 0; i < std::min(before.recompute.size(), after.recompute.size()); ++i) {
      value(concat("unit ", name(before_, static_cast<UnitId>(i)), ", recomputed"),
            word_of(kRecomputeWords, before.recompute[i]),
            word_of(kRecomputeWords, after.recompute[i]));
    }
    value("reductions", word_of(kReduceWords, before.reduce), word_of(kReduceWords, after.reduce));
    value("units ahead in forward", before.ahead_in_forward, after.ahead_in_forward);
    value("units ahead in backward", before.ahead_in_backward, after.ahead_in_backward);
  }

  /// The first place where two lists differ; `text` says what an item is.
  template <class List, class Text>
  void first(const std::string& what, const List& before, const List& after, const Text& text) {
    if (before == after) return;
    const auto item = [&](const StepPlan& plan, const List& list, std::size_t i) {
      return i < list.size() ? text(plan, list[i]) : std::string("nothing more");
    };
    std::size_t i = 0;
    while (i < std::min(before.size(), after.size()) && before[i] == after[i]) ++i;
    lines_.push_back(concat(what, " ", i + 1, " of ", before.size(), ", ", after.size(), ": ",
                            item(before_, before, i), ", ", item(after_, after, i)));
  }

  std::string stage(std::size_t number) const {
    return std::max(before_.stages.size(), after_.stages.size()) > 1
               ? concat("stage ", number, ", ")
               : "";
  }

  void record() {
    const auto& before = before_.record.stages;
    const auto& after = after_.record.stages;
    value("recorded stages", before.size(), after.size());
    value<std::string>("micro-batches differ", yes_or_no(before_.record.varies),
                       yes_or_no(after_.record.varies));
    for (std::size_t s = 0; s < std::min(before.size(), after.size()); ++s) {
      value(stage(s) + "forwards", before[s].parts.size(), after[s].parts.size());
      value(stage(s) + "forwards that a backward goes through", before[s].reached.size(),
            after[s].reached.size());
      for (std::size_t p = 0; p < std::min(before[s].parts.size(), after[s].parts.size()); ++p) {
        part(concat(stage(s), "forward ", p + 1, ", "), before[s], after[s], p);
      }
    }
  }

  void part(const std::string& what, const StageRecord& before, const StageRecord& after,
            std::size_t p) {
    first(what + "entry", before.parts[p].units, after.parts[p].units,
          [](const StepPlan& plan, UnitId unit) { return name(plan, unit); });
    const auto number = [](const StepPlan&, auto one) { return concat(one); };
    first(what + "exit", before.parts[p].exits, after.parts[p].exits, number);
    first(what + "checkpoint of entry", before.parts[p].checkpoints, after.parts[p].checkpoints,
          number);
    if (p >= std::min(before.reached.size(), after.reached.size())) return;
    first(what + "reach of entry", before.reached[p], after.reached[p],
          [](const StepPlan&, bool one) { return std::string(yes_or_no(one)); });
  }

  void stages() {
    value("stages", before_.stages.size(), after_.stages.size());
    for (std::size_t s = 0; s < std::min(before_.stages.size(), after_.stages.size()); ++s) {
      const auto& before = before_.stages[s];
      const auto& after = after_.stages[s];
      for (const auto which : kClasses) {
        const auto what = concat(stage(s), "micro-batch ", to_string(which));
        pass(what + ", forward, ", before.of(which).forward, after.of(which).forward);
        pass(what + ", backward, ", before.of(which).backward, after.of(which).backward);
      }
    }
  }

  void actions(const std::string& what, const std::vector<fsdp::PlanAction>& before,
               const std::vector<fsdp::PlanAction>& after) {
    first(what + "action", before, after, [](const StepPlan& plan, const fsdp::PlanAction& action) {
      return concat(to_string(action.kind), " ", name(plan, action.unit));
    });
  }

  void pass(const std::string& what, const PassPlan& before, const PassPlan& after) {
    actions(what, before.actions, after.actions);
    if (before.actions == after.actions && before.places != after.places) {
      lines_.push_back(what + "the same actions at other places");
    }
  }

  const StepPlan& before_;
  const StepPlan& after_;
  std::vector<std::string> lines_;
};

}  // namespace

std::vector<std::string> diff(const StepPlan& before, const StepPlan& after) {
  return Diff(before, after).lines();
}

}  // namespace tessera::capture
