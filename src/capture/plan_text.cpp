#include "capture/plan_text.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/text/alike.h"
#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::Keep;
using fsdp::MicroBatchClass;
using fsdp::PassedPlace;
using fsdp::PassPlan;
using fsdp::PlanAction;
using fsdp::StepPlan;
using fsdp::UnitId;
using Kind = PlanAction::Kind;

/// "full: as activation_checkpoint.mode or set_recompute says".
std::string recompute_text(const StepPlan& plan, const Chosen& chosen, UnitId unit) {
  const auto mode = word_of(plan.choices.recompute[unit]);
  const bool is_known = unit < chosen.recompute_reasons.size();
  const bool has_reason = is_known && !chosen.recompute_reasons[unit].empty();
  return concat(mode, ": ", has_reason ? chosen.recompute_reasons[unit] : "as chosen");
}

class Text {
 public:
  Text(const StepPlan& plan, const Chosen& chosen, std::size_t stage)
      : plan_(plan), chosen_(chosen), record_(plan.record.stages[stage]) {}

  std::string of(const PassPlan& pass, bool is_forward) {
    places_ = is_forward ? forward_places(record_) : backward_places(record_);
    is_forward_ = is_forward;
    text_.clear();
    std::size_t done = 0;
    for (now_ = 0; now_ < places_.size(); ++now_) {
      const auto& place = places_[now_];
      const auto& counts = pass.places[place.part][place.position];
      const auto& name = plan_.units[unit_at(place)].name;
      if (place.begins) {
        lines(pass, done, counts.needed, concat("before ", name));
        lines(pass, done, counts.ahead, concat("while ", name, " computes"));
      } else {
        lines(pass, done, counts.after, concat("after ", name));
      }
    }
    lines(pass, done, pass.actions.size(), "at the end");
    return std::move(text_);
  }

 private:
  UnitId unit_at(const PassedPlace& place) const {
    return record_.parts[place.part].units[place.position];
  }

  void lines(const PassPlan& pass, std::size_t& done, std::size_t count, const std::string& when) {
    for (; done < count; ++done) {
      const auto& action = pass.actions[done];
      text_ += concat("  ", when, ": ", to_string(action.kind), " ", plan_.units[action.unit].name,
                      " (", reason(action), ")\n");
    }
  }

  /// Returns the next place from here on where the unit is read.
  std::optional<UnitId> next_use(UnitId unit) const {
    for (auto i = now_; i < places_.size(); ++i) {
      if (!places_[i].begins) continue;
      const auto& [part, position, begins] = places_[i];
      if (!is_forward_ && (record_.reached.empty() || !record_.reached[part][position])) continue;
      const auto user = unit_at(places_[i]);
      const auto& owners = plan_.units[user].owners;
      if (user == unit || std::ranges::find(owners, unit) != owners.end()) return user;
    }
    return std::nullopt;
  }

  std::string of_choice(UnitId unit, std::string_view otherwise) const {
    const bool is_known = unit < chosen_.keep_reasons.size() && !chosen_.keep_reasons[unit].empty();
    return is_known ? chosen_.keep_reasons[unit] : std::string(otherwise);
  }

  std::string reason(const PlanAction& action) const {
    switch (action.kind) {
      case Kind::kGather:
      case Kind::kGatherShared: {
        const auto user = next_use(action.unit);
        return user ? concat("needed by ", plan_.units[*user].name)
                    : "named as a prefetch, and not needed";
      }
      case Kind::kWait: {
        const auto user = next_use(action.unit);
        return user ? concat("read by ", plan_.units[*user].name) : "no gather outlasts its pass";
      }
      case Kind::kKeepToBackward:
      case Kind::kKeepToUpdate:
        return of_choice(action.unit, "as chosen");
      case Kind::kRelease:
        if (!is_forward_) return "nothing more reads it here";
        return of_choice(action.unit, "gathered again where it is needed");
      case Kind::kReduce:
        return "nothing more brings it a gradient";
      case Kind::kRecompute:
        return recompute_text(plan_, chosen_, action.unit);
    }
    return "";
  }

  const StepPlan& plan_;
  const Chosen& chosen_;
  const fsdp::StageRecord& record_;
  std::vector<PassedPlace> places_;
  std::size_t now_ = 0;
  bool is_forward_ = true;
  std::string text_;
};

std::vector<MicroBatchClass> classes_of(std::int64_t micro_batches) {
  if (micro_batches == 1) return {MicroBatchClass::kOnly};
  if (micro_batches == 2) return {MicroBatchClass::kFirst, MicroBatchClass::kLast};
  return {MicroBatchClass::kFirst, MicroBatchClass::kMiddle, MicroBatchClass::kLast};
}

std::string_view until(Keep keep) {
  return keep == Keep::kUpdate     ? "kept to the update"
         : keep == Keep::kBackward ? "kept to its backward"
                                   : "resharded after forward";
}

}  // namespace

std::string to_text(const StepPlan& plan, const Chosen& chosen, std::int64_t micro_batches) {
  std::string text;
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    Text words(plan, chosen, stage);
    for (const auto which : classes_of(micro_batches)) {
      const auto& [forward, backward] = plan.stages[stage].of(which);
      const auto of = concat(plan.stages.size() > 1 ? concat("stage ", stage, ", ") : "",
                             "micro-batch ", to_string(which));
      text += concat(of, ", forward:\n", words.of(forward, true));
      text += concat(of, ", backward:\n", words.of(backward, false));
    }
  }
  return text;
}

namespace {

/// The choices of one unit, as the text that follows the unit's name.
struct UnitChoice {
  std::string name;
  std::string text;
};

std::string choice_text(const StepPlan& plan, const Chosen& chosen, UnitId unit) {
  const auto& of = plan.units[unit];
  std::string text = concat(" (", size_text(of.bytes), "): ");
  if (of.gathers) {
    text += until(plan.choices.keep[unit]);
    const bool is_known = unit < chosen.keep_reasons.size() && !chosen.keep_reasons[unit].empty();
    text += is_known ? concat(": ", chosen.keep_reasons[unit], "\n") : "\n";
  } else {
    text += "nothing to gather\n";
  }
  const bool has_reason =
      unit < chosen.recompute_reasons.size() && !chosen.recompute_reasons[unit].empty();
  if (plan.choices.recompute[unit] != RecomputeMode::kNone || has_reason) {
    text += concat("    recomputed, ", recompute_text(plan, chosen, unit), "\n");
  }
  return text;
}

/// Prints choices, with one line for layers that have the same.
std::string folded(const std::vector<UnitChoice>& choices) {
  std::string text;
  for (const auto& group : alike(
           choices, [](const UnitChoice& one) { return one.name; },
           [](const UnitChoice& one, const UnitChoice& other) { return one.text == other.text; })) {
    text += concat("  ", group.shown(group.first.name), group.first.text);
  }
  return text;
}

}  // namespace

std::string choices_text(const StepPlan& plan, const Chosen& chosen) {
  std::vector<UnitChoice> units;
  for (UnitId unit = 0; unit < plan.units.size(); ++unit) {
    units.push_back({plan.units[unit].name, choice_text(plan, chosen, unit)});
  }
  std::string text = folded(units);
  const auto ahead = [](std::size_t count) {
    return count_text(static_cast<std::int64_t>(count), "unit");
  };
  text += concat("  gathered ahead: ", ahead(plan.choices.ahead_in_forward), " in forward, ",
                 ahead(plan.choices.ahead_in_backward), " in backward", "\n",
                 chosen.ahead_reason.empty() ? "" : concat("    ", chosen.ahead_reason, "\n"));
  return text + concat("  reduced: ", word_of(plan.choices.reduce), "\n");
}

}  // namespace tessera::capture
