#include "capture/plan_diff.h"

#include <algorithm>

#include "base/text/fields.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::PlanAction;
using fsdp::StepPlan;
using fsdp::UnitId;

/// The differences that have another form than "field: before, after": units by their names, lists
/// by their stages, forwards and micro-batches.
class DiffRules {
 public:
  DiffRules(const StepPlan& before, const StepPlan& after) : before_(before), after_(after) {}

  std::string text(UnitId unit, fsdp::EnteredUnits, Side side) const { return name(unit, side); }
  std::string text(const std::vector<UnitId>& units, fsdp::UnitNumbers, Side side) const {
    std::vector<std::string> found;
    for (const auto unit : units) found.push_back(name(unit, side));
    return joined(found, "none");
  }
  std::string text(const PlanAction& action, fsdp::Actions, Side side) const {
    return concat(to_string(action.kind), " ", name(action.unit, side));
  }

  template <class Out>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<fsdp::PlanUnit>& before, const std::vector<fsdp::PlanUnit>& after,
              fsdp::AllUnits) const {
    out.of(where, what, before.size(), after.size());
    for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      out.of(where, concat("unit ", i), before[i].name, after[i].name);
      out.of_fields(concat("unit ", before[i].name), before[i], after[i]);
    }
  }
  /// Reports a changed name of a unit with the unit's number.
  template <class Out>
  void differ(Out&, const std::string&, const std::string&, const std::string&, const std::string&,
              fsdp::UnitName) const {}

  template <class Out>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<UnitId>& before, const std::vector<UnitId>& after,
              fsdp::UnitNumbers of) const {
    out.line(concat(out.join(where, what), ": ", text(before, of, Side::kBefore), "; ",
                    text(after, of, Side::kAfter)));
  }

  template <class Out, class Choice>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<Choice>& before, const std::vector<Choice>& after,
              fsdp::ByUnit of) const {
    out.of(where, std::string(of.all), before.size(), after.size());
    for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      out.of(concat("unit ", name(static_cast<UnitId>(i), Side::kBefore)), what, before[i],
             after[i]);
    }
  }

  template <class Out, class Stage>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<Stage>& before, const std::vector<Stage>& after,
              fsdp::ByStage) const {
    out.of(where, what, before.size(), after.size());
    const bool is_one = std::max(before_.stages.size(), after_.stages.size()) <= 1;
    for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      out.of_fields(is_one ? where : out.join(where, concat("stage ", i)), before[i], after[i]);
    }
  }

  template <class Out, class Range>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<fsdp::Trace>& before, const std::vector<fsdp::Trace>& after,
              const Range&) const {
    out.of(where, what, before.size(), after.size());
    for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      out.of_fields(out.join(where, concat("forward ", i + 1)), before[i], after[i]);
    }
  }
  template <class Out, class Range>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::vector<fsdp::Reach>& before, const std::vector<fsdp::Reach>& after,
              const Range&) const {
    out.of(where, what, before.size(), after.size());
    for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      out.of(out.join(where, concat("forward ", i + 1)), "reach of entry", before[i], after[i]);
    }
  }

  template <class Out, class MicroBatches>
  void differ(Out& out, const std::string& where, const std::string&, const MicroBatches& before,
              const MicroBatches& after, ByWord<fsdp::MicroBatchClass>) const {
    for (const auto& [word, which] : words_of(fsdp::MicroBatchClass{})) {
      const auto at = static_cast<std::size_t>(which);
      out.of_fields(out.join(where, concat("micro-batch ", word)), before.at(at), after.at(at));
    }
  }
  /// Skips counts of actions at each place, which say little where the actions differ.
  template <class Out>
  void differ(Out& out, const std::string& where, const std::string& what,
              const fsdp::PassPlan& before, const fsdp::PassPlan& after, AnyValue) const {
    const auto pass = out.join(where, what);
    if (before.actions == after.actions) {
      out.line(out.join(pass, "the same actions at other places"));
    } else {
      out.first(pass, "action", before.actions, after.actions, fsdp::kActions);
    }
  }

 private:
  std::string name(UnitId unit, Side side) const {
    const auto& units = side == Side::kBefore ? before_.units : after_.units;
    return unit < units.size() ? units[unit].name : concat("unit ", unit);
  }

  const StepPlan& before_;
  const StepPlan& after_;
};

}  // namespace

std::vector<std::string> diff(const StepPlan& before, const StepPlan& after) {
  const DiffRules rules(before, after);
  Differences differences(rules);
  differences.of_fields("", before, after);
  return differences.take();
}

}  // namespace tessera::capture
