// StepPlan: what one step does with the memory and the gradients of a sharded model, as a value.
//
// A record (order.h) says what a step runs: for each stage the units that its forward enters, and
// those that its backward goes through. A plan says what happens around that: when a unit is
// gathered and waited for, how long it is kept, when it is released and when its gradients are
// reduced. It is a pure function of values that all ranks have agreed on, the record and the
// choices (PlanChoices), so that every rank makes the same one. A step scope runs its actions and
// no others ([Note: step scope] in ../runtime/open_step.h). Compiler passes change choices
// (src/capture/), never lists.
//
// ZeRO's stages are three choices: 3 gathers for each forward and each backward, 2 gathers once a
// step and reduces every micro-batch, 1 gathers once a step and reduces with the last micro-batch.
//
// Pure: no torch header. Next: step_plan_check.h (what holds for every plan), open_step.h. Source:
// DeepCompile (arXiv 2504.09983) schedules gathers and releases as nodes of a graph; a unit is one
// flat message here, so the places between units are all that there is to choose.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/words.h"
#include "fsdp/agreed/order.h"
#include "grad/enum_words.h"
#include "tessera/recompute_mode.h"

namespace tessera::fsdp {

// Limits of plan files (order.h). The bytes of all units stay within 62 bits.
inline constexpr std::int64_t kMostPlanUnits = 1 << 13;
inline constexpr std::int64_t kMostPlanActions = 1 << 20;
inline constexpr std::int64_t kMostUnitBytes = std::int64_t{1} << 48;

/// Ranges that only a whole plan defines: its units, the number of a unit, several numbers, a
/// choice for each unit, and actions, whose number in the whole plan is limited.
struct AllUnits : List<> {};
struct UnitName : TextLimit {};
struct UnitNumber {};
struct UnitNumbers {};
struct ByUnit : List<> {
  std::string_view all = {};  ///< what differences call the list
};
struct Actions : List<> {};
inline constexpr Actions kActions{{kMostPlanActions, "actions"}};

/// Who chooses how a unit's forward is computed again in its backward.
enum class RecomputeBy : std::uint8_t {
  kNone,  ///< no choice: it is not Recomputable, or has units inside
  kUser,  ///< Recomputable::set_recompute, which binds
  kPlan,
};
constexpr auto words_of(RecomputeBy) {
  return std::to_array<Word<RecomputeBy>>(
      {{"nobody", RecomputeBy::kNone}, {"user", RecomputeBy::kUser}, {"plan", RecomputeBy::kPlan}});
}

/// A unit as plans see it, the same on every rank.
struct PlanUnit {
  std::string name = {};            ///< the name that messages show
  std::int64_t bytes = 0;           ///< size of its gathered memory
  bool gathers = false;             ///< it has parameters, which are gathered before they are read
  bool gathers_in_backward = true;  ///< also for its backward
  bool gathered = false;            ///< it is gathered when the step begins
  bool reduces = false;             ///< its gradients are summed over ranks
  std::vector<UnitId> owners = {};  ///< units that own some of its parameters
  /// Units that are gathered while it computes; empty: those that come next.
  std::vector<UnitId> forward_prefetch = {}, backward_prefetch = {};
  RecomputeBy recompute_by = RecomputeBy::kNone;
  bool operator==(const PlanUnit&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<PlanUnit>) {
  visit("name", &PlanUnit::name, UnitName{{256, Letters::kPrintable}});
  visit("bytes", &PlanUnit::bytes, IntRange{0, kMostUnitBytes});
  visit("gathers", &PlanUnit::gathers);
  visit("gathers_in_backward", &PlanUnit::gathers_in_backward);
  visit({"gathered", "is gathered when the step begins"}, &PlanUnit::gathered);
  visit("reduces", &PlanUnit::reduces);
  visit("lenders", &PlanUnit::owners, UnitNumbers{});
  visit({"forward_prefetch", "prefetch in forward"}, &PlanUnit::forward_prefetch, UnitNumbers{});
  visit({"backward_prefetch", "prefetch in backward"}, &PlanUnit::backward_prefetch, UnitNumbers{});
  visit({"recompute_by", "recomputed by"}, &PlanUnit::recompute_by);
}

/// How long a unit's memory stays after its forward.
enum class Keep : std::uint8_t {
  kNot,       ///< until its forward ends; gathered again for its backward
  kBackward,  ///< from each forward to the backward that follows it
  kUpdate,    ///< from its first use in a step to the end of the step
};
constexpr auto words_of(Keep) {
  return std::to_array<Word<Keep>>(
      {{"not", Keep::kNot}, {"backward", Keep::kBackward}, {"update", Keep::kUpdate}});
}

/// When the gradients of a unit are reduced.
enum class ReduceAt : std::uint8_t {
  kEveryBackward,  ///< after its last use in the backward of every micro-batch
  kLastBackward,   ///< the same, for the last micro-batch only
  kAsked,          ///< where StepScope::reduce() of its stage says so, or at the end of the step
};
constexpr auto words_of(ReduceAt) {
  return std::to_array<Word<ReduceAt>>({{"every backward", ReduceAt::kEveryBackward},
                                        {"last backward", ReduceAt::kLastBackward},
                                        {"asked", ReduceAt::kAsked}});
}

struct PlanChoices {
  std::vector<Keep> keep;  ///< by unit
  ReduceAt reduce = ReduceAt::kLastBackward;
  /// How many of the next units are gathered while a unit computes that has no prefetch list.
  std::size_t ahead_in_forward = 1;
  std::size_t ahead_in_backward = 1;
  /// By unit; kNone for units without a choice. make_plan() takes an empty list as kNone for all.
  std::vector<RecomputeMode> recompute = {};
  bool operator==(const PlanChoices&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<PlanChoices>) {
  visit({"keep", "kept until"}, &PlanChoices::keep,
        ByUnit{{kMostPlanUnits, "choices"}, "choices of units"});
  visit({"recompute", "recomputed"}, &PlanChoices::recompute,
        ByUnit{{kMostPlanUnits, "choices"}, "recompute modes"});
  visit({"reduce", "reductions"}, &PlanChoices::reduce);
  visit({"ahead_in_forward", "units ahead in forward"}, &PlanChoices::ahead_in_forward,
        IntRange{0, kMostPlanUnits});
  visit({"ahead_in_backward", "units ahead in backward"}, &PlanChoices::ahead_in_backward,
        IntRange{0, kMostPlanUnits});
}

struct PlanAction {
  enum class Kind : std::uint8_t {
    kGather,        ///< issues the gather
    kGatherShared,  ///< issues it unless it is gathered: other stages of the rank use the unit, too
    kWait,          ///< waits for the gather: from here on the unit can be read
    kKeepToBackward,
    kKeepToUpdate,
    kRelease,    ///< frees the gathered memory
    kReduce,     ///< issues the sum of its gradients over ranks
    kRecompute,  ///< notes that the module runs its forward again, before its backward
  };
  Kind kind = Kind::kGather;
  UnitId unit = 0;
  bool operator==(const PlanAction&) const = default;
};
constexpr auto words_of(PlanAction::Kind) {
  using Kind = PlanAction::Kind;
  return std::to_array<Word<Kind>>({{"gather", Kind::kGather},
                                    {"gather unless gathered", Kind::kGatherShared},
                                    {"wait", Kind::kWait},
                                    {"keep to backward", Kind::kKeepToBackward},
                                    {"keep to update", Kind::kKeepToUpdate},
                                    {"release", Kind::kRelease},
                                    {"reduce", Kind::kReduce},
                                    {"recompute", Kind::kRecompute}});
}
template <class V>
constexpr void row(V& visit, Of<PlanAction>) {
  visit("action", &PlanAction::kind);
  visit("unit", &PlanAction::unit, UnitNumber{});
}

/// How many of the actions are done before, while and after one unit computes.
struct PlanPlace {
  std::size_t needed = 0;
  std::size_t ahead = 0;
  std::size_t after = 0;
  bool operator==(const PlanPlace&) const = default;
};
template <class V>
constexpr void row(V& visit, Of<PlanPlace>) {
  visit("needed", &PlanPlace::needed, IntRange{0, kMostPlanActions});
  visit("ahead", &PlanPlace::ahead, IntRange{0, kMostPlanActions});
  visit("after", &PlanPlace::after, IntRange{0, kMostPlanActions});
}

/// The forward or the backward of one micro-batch. A backward passes the places of a trace as
/// pass_planner.h says; a rank that skips a place runs its actions at the next place that it
/// passes, or at the end of the pass.
struct PassPlan {
  std::vector<PlanAction> actions;
  std::vector<std::vector<PlanPlace>> places;  ///< by part and position of its trace
  bool operator==(const PassPlan&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<PassPlan>) {
  visit({"actions", "action"}, &PassPlan::actions, kActions);
  visit("places", &PassPlan::places, List{kMostPlaces, "forwards", List{kMostPlaces, "places"}});
}

struct MicroBatchPlan {
  PassPlan forward, backward;
  bool operator==(const MicroBatchPlan&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<MicroBatchPlan>) {
  visit("forward", &MicroBatchPlan::forward);
  visit("backward", &MicroBatchPlan::backward);
}

/// Micro-batches of one step differ in what is gathered before them and reduced after them.
enum class MicroBatchClass : std::uint8_t { kOnly, kFirst, kMiddle, kLast };
inline constexpr std::size_t kMicroBatchClasses = 4;
constexpr auto words_of(MicroBatchClass) {
  return std::to_array<Word<MicroBatchClass>>({{"only", MicroBatchClass::kOnly},
                                               {"first", MicroBatchClass::kFirst},
                                               {"middle", MicroBatchClass::kMiddle},
                                               {"last", MicroBatchClass::kLast}});
}
inline std::string_view to_string(MicroBatchClass of) { return word_of(of); }
inline std::string_view to_string(PlanAction::Kind kind) { return word_of(kind); }

/// Returns the class of the `index`-th micro-batch that a stage begins. `count`: the number of
/// micro-batches in a step, 0 where it is not known: then none counts as the last one.
MicroBatchClass class_of(std::int64_t index, std::int64_t count);

/// Whether the backward of such a micro-batch reduces.
bool reduces(ReduceAt when, MicroBatchClass which);

struct StagePlan {
  std::array<MicroBatchPlan, kMicroBatchClasses> micro_batches;  ///< by class
  const MicroBatchPlan& of(MicroBatchClass which) const {
    return micro_batches.at(static_cast<std::size_t>(which));
  }
  bool operator==(const StagePlan&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<StagePlan>) {
  visit("micro_batches", &StagePlan::micro_batches, ByWord<MicroBatchClass>{});
}

/// The order of micro-batches: one after the other, each backward right after its forward, or the
/// order of a pipeline's schedule.
enum class PlanOrder : std::uint8_t { kOneAfterTheOther, kAny };
constexpr auto words_of(PlanOrder) {
  return std::to_array<Word<PlanOrder>>(
      {{"one after the other", PlanOrder::kOneAfterTheOther}, {"any", PlanOrder::kAny}});
}

struct StepPlan {
  PlanOrder order = PlanOrder::kOneAfterTheOther;
  std::vector<PlanUnit> units;
  PlanChoices choices;  ///< the choices that it was made by
  StepRecord record;    ///< the record that it was made for
  std::vector<StagePlan> stages;
  bool operator==(const StepPlan&) const = default;
  /// The same on every rank and every machine for equal plans.
  std::uint64_t hash() const;
};

template <class V>
constexpr void fields(V& visit, Of<StepPlan>) {
  visit({"order", "order of micro-batches"}, &StepPlan::order);
  visit("units", &StepPlan::units, AllUnits{{kMostPlanUnits, "units"}});
  visit({"choices", ""}, &StepPlan::choices);
  visit({"record", ""}, &StepPlan::record);
  visit("stages", &StepPlan::stages, kStages);
}

/// A place of a pass: a unit's forward or backward begins there, or ends.
struct PassedPlace {
  std::size_t part = 0;
  std::size_t position = 0;  ///< in the part's trace
  bool begins = true;
  bool operator==(const PassedPlace&) const = default;
};
/// Return the places of a stage in the order in which each forward, or each backward, passes them.
/// A backward passes the places inside a checkpoint where the first of them would be
/// (pass_planner.h).
std::vector<PassedPlace> forward_places(const StageRecord& record);
std::vector<PassedPlace> backward_places(const StageRecord& record);

/// Returns the units that a stage's passes use: those that are entered, the owners of their
/// parameters, and those in their prefetch lists.
std::set<UnitId> units_of_stage(const StageRecord& record, const std::vector<PlanUnit>& units);
/// Returns, by unit, whether several stages of the rank use it.
std::vector<bool> shared_by_stages(const StepRecord& record, const std::vector<PlanUnit>& units);

/// Returns, by unit, whether a plan may choose its recompute mode: where it is entered no other
/// unit is, and no checkpoint around it runs it again. Another mode would be another trace.
std::vector<bool> may_be_recomputed(const StepRecord& record, const std::vector<PlanUnit>& units);

/// Returns the default choices of a step, except the recompute modes that users set. `resharded`,
/// by unit: its memory is released after its forward, except the last unit of a forward whose
/// backward comes next.
PlanChoices eager_choices(const StepRecord& record, const std::vector<bool>& resharded,
                          ReduceAt reduce, PlanOrder order);

/// The plan of a record that is complete. Errors: kUsage for Keep::kBackward in PlanOrder::kAny,
/// where another micro-batch comes between a forward and its backward.
StepPlan make_plan(const StepRecord& record, std::vector<PlanUnit> units,
                   const PlanChoices& choices, PlanOrder order);

/// Makes plans in place of the eager ones: a pure function, the same on every rank, of a record,
/// the units, the choices of an eager plan, and the order. Its plan is checked (step_plan_check.h)
/// and compared between ranks before it is followed.
using Planner = std::function<StepPlan(const StepRecord&, const std::vector<PlanUnit>&,
                                       const PlanChoices&, PlanOrder)>;

/// Returns a line for each action, place by place: "micro-batch first, forward of layers.1: gather
/// layers.2".
std::string to_string(const StepPlan& plan);

}  // namespace tessera::fsdp
