#include "fsdp/agreed/step_plan_check.h"

#include <algorithm>
#include <map>
#include <set>

#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using Kind = PlanAction::Kind;

/// The units that a rank has gathered, and those of them that are readable.
struct Memory {
  std::set<UnitId> gathered;  ///< gathered, or being gathered
  std::set<UnitId> readable;  ///< those that were waited for
  bool operator==(const Memory&) const = default;
};

/// Walks through the passes of one stage.
class Walk {
 public:
  Walk(const StepPlan& plan, std::size_t stage, std::optional<std::int64_t> budget,
       std::vector<std::string>& faults)
      : plan_(plan),
        record_(plan.record.stages[stage]),
        stage_(plan.stages[stage]),
        stage_number_(stage),
        budget_(budget),
        faults_(faults) {
    const auto shared = shared_by_stages(plan.record, plan.units);
    const auto used = units_of_stage(record_, plan.units);
    for (UnitId unit = 0; unit < plan.units.size(); ++unit) {
      if (!plan.units[unit].gathered || shared[unit]) continue;
      add_bytes(unit, 1);
      // Units that the stage does not use stay as they are.
      if (!used.contains(unit)) continue;
      memory_.gathered.insert(unit);
      memory_.readable.insert(unit);
    }
  }

  void run(MicroBatchClass which) {
    which_ = which;
    run("forward", stage_.of(which).forward, forward_places(record_), /*is_forward=*/true);
    require_passed("forward", Keep::kBackward);
    run("backward", stage_.of(which).backward, backward_places(record_),
        /*is_forward=*/false);
    require_passed("backward", Keep::kUpdate);
  }
  const Memory& memory() const { return memory_; }
  std::int64_t peak() const { return peak_; }
  void expect(const Memory& memory, const std::string& what) {
    if (memory_ != memory) faults_.push_back(what);
  }

 private:
  const std::string& name(UnitId unit) const { return plan_.units[unit].name; }
  template <class... Words>
  void fault(const char* pass, const Words&... words) {
    faults_.push_back(concat(plan_.stages.size() > 1 ? concat("stage ", stage_number_, ", ") : "",
                             "micro-batch ", to_string(which_), ", ", pass, ": ", words...));
  }
  void add_bytes(UnitId unit, int sign) {
    bytes_ += sign * plan_.units[unit].bytes;
    peak_ = std::max(peak_, bytes_);
  }

  template <class Act>
  void for_owners_and(UnitId unit, const Act& act) const {
    for (const auto owner : plan_.units[unit].owners) act(owner);
    act(unit);
  }
  bool is_used(const PassedPlace& place, bool is_forward) const {
    if (is_forward) return true;
    return !record_.reached.empty() && record_.reached[place.part][place.position];
  }

  void run(const char* pass_name, const PassPlan& pass, const std::vector<PassedPlace>& places,
           bool is_forward) {
    pass_ = pass_name;
    users_.assign(plan_.units.size(), 0);
    reduced_.clear();
    is_forward_ = is_forward;
    last_.clear();
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i].begins) continue;
      for_owners_and(unit_at(places[i]), [&](UnitId one) { last_[one] = i; });
    }
    find_uses(places);
    std::size_t done = 0;
    for (now_ = 0; now_ < places.size(); ++now_) {
      const auto& place = places[now_];
      const auto& counts = pass.places[place.part][place.position];
      const auto unit = unit_at(place);
      const bool used = is_used(place, is_forward);
      begins_.reset();
      if (!place.begins) {
        if (used) for_owners_and(unit, [&](UnitId one) { --users_[one]; });
        advance(pass, done, counts.after);
        continue;
      }
      if (used) begins_ = unit;
      runs_again_ = false;
      advance(pass, done, counts.needed);
      if (used) {
        for_owners_and(unit, [&](UnitId one) { use(one); });
        ++next_use_;
      }
      is_ahead_ = used;
      advance(pass, done, counts.ahead);
      is_ahead_ = false;
      if (used) require_ahead(unit);
      const bool is_told = plan_.choices.recompute[unit] != RecomputeMode::kNone;
      if (!is_forward && used && is_told && !runs_again_) {
        fault(pass_name, "unit ", name(unit), " is to be recomputed, which no action says");
      }
    }
    begins_.reset();
    advance(pass, done, pass.actions.size());
    require_reduced();
  }

  /// Lists the uses of this pass in their order, for gathers ahead, and those of each unit.
  void find_uses(const std::vector<PassedPlace>& places) {
    uses_.clear();
    uses_of_.assign(plan_.units.size(), {});
    next_use_ = looked_at_ = 0;
    for (const auto& place : places) {
      if (!place.begins || !is_used(place, is_forward_)) continue;
      for_owners_and(unit_at(place), [&](UnitId one) { uses_of_[one].push_back(uses_.size()); });
      uses_.push_back(place);
    }
  }
  std::size_t ahead() const {
    return is_forward_ ? plan_.choices.ahead_in_forward : plan_.choices.ahead_in_backward;
  }
  /// Whether the units after it are gathered while it computes: where it names none itself.
  bool looks_ahead(UnitId unit) const {
    const auto& of = plan_.units[unit];
    return (is_forward_ ? of.forward_prefetch : of.backward_prefetch).empty();
  }
  /// Returns the end of the uses that are gathered ahead during the use before `next_use_`. A
  /// forward looks no further than its end.
  std::size_t end_of_ahead() const {
    const auto& now = uses_[next_use_ - 1];
    const auto left = is_forward_ ? record_.parts[now.part].units.size() - now.position - 1
                                  : uses_.size() - next_use_;
    return next_use_ + std::min(ahead(), left);
  }

  /// Requires that the next units are gathered while `unit` computes, as many as were chosen.
  void require_ahead(UnitId unit) {
    if (!looks_ahead(unit)) return;
    const auto end = end_of_ahead();
    for (looked_at_ = std::max(looked_at_, next_use_); looked_at_ < end; ++looked_at_) {
      const auto next = unit_at(uses_[looked_at_]);
      const auto& of = plan_.units[next];
      const bool is_read = of.gathers && (is_forward_ || of.gathers_in_backward);
      if (!is_read || memory_.gathered.contains(next)) continue;
      fault(pass_, "unit ", of.name, " is not gathered while ", name(unit), " computes, where ",
            ahead(), " units ahead were chosen");
    }
  }
  void require_chosen_ahead(UnitId unit) {
    if (!is_ahead_ || !looks_ahead(*begins_)) return;
    const auto& uses = uses_of_[unit];
    const auto next = std::ranges::lower_bound(uses, next_use_);
    if (next != uses.end() && *next < end_of_ahead()) return;
    fault(pass_, "unit ", name(unit), " is gathered while ", name(*begins_), " computes, where ",
          ahead(), " units ahead were chosen");
  }

  /// Requires that a backward that reduces reduces every unit.
  void require_reduced() {
    if (is_forward_ || !reduces(plan_.choices.reduce, which_)) return;
    for (const auto& [unit, last] : last_) {
      if (!plan_.units[unit].reduces || reduced_.contains(unit)) continue;
      fault(pass_, "unit ", name(unit), " is never reduced");
    }
  }

  UnitId unit_at(const PassedPlace& place) const {
    return record_.parts[place.part].units[place.position];
  }

  void use(UnitId unit) {
    ++users_[unit];
    const auto& of = plan_.units[unit];
    if (!of.gathers || (!is_forward_ && !of.gathers_in_backward)) return;
    if (!memory_.gathered.contains(unit)) {
      fault(pass_, "unit ", of.name, " is used where it is not gathered");
    } else if (!memory_.readable.contains(unit)) {
      fault(pass_, "unit ", of.name, " is used before the wait for its gather");
    }
  }

  void advance(const PassPlan& pass, std::size_t& done, std::size_t count) {
    if (count < done || count > pass.actions.size()) {
      fault(pass_, "a place comes after ", count, " of ", pass.actions.size(),
            " actions, expected at least the ", done, " of the places before it");
      return;
    }
    while (done < count) act(pass.actions[done++]);
  }

  void act(const PlanAction& action) {
    const auto unit = action.unit;
    const bool is_of_gathers = action.kind <= Kind::kRelease;
    if (!plan_.units[unit].gathers && is_of_gathers) {
      return fault(pass_, to_string(action.kind), " of unit ", name(unit),
                   ", which has nothing to gather");
    }
    switch (action.kind) {
      case Kind::kGatherShared:
      case Kind::kGather:
        if (!memory_.gathered.insert(unit).second) {
          return fault(pass_, "unit ", name(unit), " is gathered while it is gathered");
        }
        require_chosen_ahead(unit);
        add_bytes(unit, 1);
        if (budget_ && bytes_ > *budget_) {
          fault(pass_, "gathered memory of ", bytes_, " bytes with unit ", name(unit),
                ", over the budget of ", *budget_);
        }
        return;
      case Kind::kWait:
        if (!memory_.gathered.contains(unit) || !memory_.readable.insert(unit).second) {
          fault(pass_, "a wait for unit ", name(unit), ", of which no gather is under way");
        }
        return;
      case Kind::kKeepToBackward:
      case Kind::kKeepToUpdate:
        return keep(action);
      case Kind::kRelease:
        return release(unit);
      case Kind::kReduce:
        return reduce(unit);
      case Kind::kRecompute:
        return recompute(unit);
    }
  }

  void keep(const PlanAction& action) {
    const auto until = action.kind == Kind::kKeepToUpdate ? Keep::kUpdate : Keep::kBackward;
    if (!is_forward_ || plan_.choices.keep[action.unit] != until) {
      fault(pass_, to_string(action.kind), " of unit ", name(action.unit),
            ", which was not chosen to be kept so");
    }
    if (!memory_.gathered.contains(action.unit)) {
      fault(pass_, to_string(action.kind), " of unit ", name(action.unit),
            ", which is not gathered");
    }
  }

  void release(UnitId unit) {
    if (memory_.gathered.erase(unit) == 0) {
      return fault(pass_, "unit ", name(unit), " is released where it is not gathered");
    }
    memory_.readable.erase(unit);
    add_bytes(unit, -1);
    if (users_[unit] > 0) fault(pass_, "unit ", name(unit), " is released while it is used");
    const auto keep = plan_.choices.keep[unit];
    if (keep == Keep::kUpdate || (keep == Keep::kBackward && is_forward_)) {
      fault(pass_, "unit ", name(unit), " is released, which was to be kept");
    }
  }

  void reduce(UnitId unit) {
    if (is_forward_ || !plan_.units[unit].reduces) {
      return fault(pass_, "unit ", name(unit), " is reduced, which has nothing to reduce here");
    }
    const auto last = last_.find(unit);
    if (last == last_.end() || now_ < last->second) {
      fault(pass_, "unit ", name(unit), " is reduced before all that may bring it a gradient");
    }
    if (!reduced_.insert(unit).second) fault(pass_, "unit ", name(unit), " is reduced twice");
    if (!reduces(plan_.choices.reduce, which_)) {
      fault(pass_, "unit ", name(unit), " is reduced, which was to wait");
    }
  }

  void recompute(UnitId unit) {
    const auto& of = plan_.units[unit];
    if (is_forward_ || plan_.choices.recompute[unit] == RecomputeMode::kNone) {
      fault(pass_, "unit ", of.name, " is recomputed, which was not chosen to be");
    } else if (begins_ != unit) {
      fault(pass_, "unit ", of.name, " is recomputed where its backward does not begin");
    } else if (runs_again_) {
      fault(pass_, "unit ", of.name, " is recomputed twice");
    } else if (of.gathers && of.gathers_in_backward && !memory_.readable.contains(unit)) {
      fault(pass_, "unit ", of.name, " is recomputed before the wait for its gather");
    }
    runs_again_ = true;
  }

  /// Requires that after a pass only the units are gathered that are kept for longer, and are
  /// waited for.
  void require_passed(const char* pass, Keep least) {
    for (const auto unit : memory_.gathered) {
      if (plan_.choices.keep[unit] >= least) continue;
      fault(pass, "unit ", name(unit), " is still gathered at its end");
    }
    for (const auto unit : memory_.gathered) {
      if (!memory_.readable.contains(unit)) {
        fault(pass, "no action waits for the gather of unit ", name(unit));
      }
    }
  }

  const StepPlan& plan_;
  const StageRecord& record_;
  const StagePlan& stage_;
  const std::size_t stage_number_;
  const std::optional<std::int64_t> budget_;
  std::vector<std::string>& faults_;
  MicroBatchClass which_ = MicroBatchClass::kOnly;
  const char* pass_ = "";
  bool is_forward_ = true;
  Memory memory_;
  std::int64_t bytes_ = 0;
  std::int64_t peak_ = 0;
  std::vector<int> users_;              // by unit
  std::map<UnitId, std::size_t> last_;  // the place after which the unit gets no gradient
  std::set<UnitId> reduced_;            // in this pass
  std::size_t now_ = 0;
  std::optional<UnitId> begins_;   // whose forward or backward begins at the present place
  bool runs_again_ = false;        // an action at the present place recomputes its forward
  std::vector<PassedPlace> uses_;  // in this pass
  std::vector<std::vector<std::size_t>> uses_of_;  // by unit: indices in uses_
  std::size_t next_use_ = 0;                       // the first use that has not begun
  std::size_t looked_at_ = 0;  // the first use that require_ahead() has not checked
  bool is_ahead_ = false;      // the present actions gather ahead
};

/// Returns faults of shape; the other checks need a plan without them.
std::vector<std::string> faults_of_shape(const StepPlan& plan) {
  std::vector<std::string> faults;
  const auto count = plan.units.size();
  const auto add = [&](const auto&... words) { faults.push_back(concat(words...)); };
  if (plan.choices.keep.size() != count)
    add("choices of ", plan.choices.keep.size(), " units of ", count);
  if (plan.choices.recompute.size() != count)
    add("recompute modes of ", plan.choices.recompute.size(), " units of ", count);
  if (plan.stages.size() != plan.record.stages.size() || !plan.record.is_complete()) {
    add(plan.stages.size(), " stages, where ", plan.record.stages.size(), " were recorded");
    return faults;
  }
  const auto is_unit = [&](UnitId unit) { return unit < count; };
  for (const auto& unit : plan.units) {
    for (const auto* list : {&unit.owners, &unit.forward_prefetch, &unit.backward_prefetch}) {
      if (!std::ranges::all_of(*list, is_unit)) add("unit ", unit.name, " names one of none");
    }
    if (unit.bytes < 0) add("unit ", unit.name, " of ", unit.bytes, " bytes");
  }
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const auto& parts = plan.record.stages[stage].parts;
    const auto& reached = plan.record.stages[stage].reached;
    bool fits = reached.empty() || reached.size() == parts.size();
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const auto places = parts[part].units.size();
      auto exits = parts[part].exits;
      std::ranges::sort(exits);
      for (std::size_t i = 0; i < exits.size(); ++i) fits = fits && exits[i] == i;
      fits = fits && exits.size() == places && parts[part].checkpoints.size() == places &&
             std::ranges::all_of(parts[part].units, is_unit) &&
             (part >= reached.size() || reached[part].size() == places);
    }
    for (const auto& one : plan.stages[stage].micro_batches) {
      for (const auto* pass : {&one.forward, &one.backward}) {
        fits = fits && pass->places.size() == parts.size();
        for (std::size_t part = 0; fits && part < parts.size(); ++part) {
          fits = pass->places[part].size() == parts[part].units.size();
        }
        fits = fits && std::ranges::all_of(pass->actions, [&](const PlanAction& action) {
                 return is_unit(action.unit);
               });
      }
    }
    if (!fits) add("stage ", stage, " does not fit what was recorded of it");
  }
  return faults;
}

}  // namespace

std::vector<std::string> faults_of(const StepPlan& plan, std::optional<std::int64_t> budget_bytes) {
  auto faults = faults_of_shape(plan);
  if (!faults.empty()) return faults;
  if (plan.order == PlanOrder::kAny &&
      std::ranges::count(plan.choices.keep, Keep::kBackward) != 0) {
    faults.emplace_back("units are kept from forward to backward, where others come between");
  }
  const auto may = may_be_recomputed(plan.record, plan.units);
  for (UnitId unit = 0; unit < plan.units.size(); ++unit) {
    const bool is_bound = plan.units[unit].recompute_by == RecomputeBy::kUser;
    if (plan.choices.recompute[unit] == RecomputeMode::kNone || is_bound || may[unit]) continue;
    faults.push_back(
        concat("unit ", plan.units[unit].name, " is to be recomputed, which no plan can tell it"));
  }
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    Walk(plan, stage, budget_bytes, faults).run(MicroBatchClass::kOnly);
    Walk steps(plan, stage, budget_bytes, faults);
    steps.run(MicroBatchClass::kFirst);
    const auto between = steps.memory();
    steps.run(MicroBatchClass::kMiddle);
    steps.expect(between,
                 concat("stage ", stage,
                        ": a middle micro-batch leaves other units gathered than it found"));
    steps.run(MicroBatchClass::kLast);
  }
  return faults;
}

std::int64_t peak_gathered_bytes(const StepPlan& plan) {
  std::vector<std::string> faults;
  std::int64_t sum = 0;
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    Walk only(plan, stage, std::nullopt, faults);
    only.run(MicroBatchClass::kOnly);
    Walk steps(plan, stage, std::nullopt, faults);
    for (const auto which :
         {MicroBatchClass::kFirst, MicroBatchClass::kMiddle, MicroBatchClass::kLast}) {
      steps.run(which);
    }
    sum += std::max(only.peak(), steps.peak());
  }
  return sum;
}

}  // namespace tessera::fsdp
