// KnownSteps keeps the record of the steps of each schedule, with the plan that the last step
// followed.
//
// A program has two or three schedules, whose names it repeats in each step; there is room for
// dozens. In a program that gives each step another name no step follows a record: such records
// replace each other, and never one that was followed. Next: ../runtime/open_step.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/agreed/order.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

/// The inputs of a plan in addition to the record; ranks agree on all of them.
struct PlanInputs {
  std::vector<PlanUnit> units;
  PlanChoices choices;  ///< eager ones
  PlanOrder order = PlanOrder::kAny;
  bool operator==(const PlanInputs&) const = default;
};

/// How often a stage's forward and backward change turns with the other pass of a pair ([Note:
/// pairs] in ../runtime/open_step.h); none where micro-batches differ.
struct StageTurns {
  std::optional<std::int64_t> forward, backward;
  bool operator==(const StageTurns&) const = default;
};
struct StepTurns {
  std::vector<StageTurns> stages;
  bool draws = false;  ///< some checkpoint has drawn random numbers of the process
  bool operator==(const StepTurns&) const = default;
  std::uint64_t hash() const;
};

struct KnownStep {
  StepRecord record;
  StepTurns turns = {};
  PlanInputs inputs = {};
  std::shared_ptr<const StepPlan> plan = nullptr;  ///< null: none yet
  std::string marks = {};                          ///< end of labels, for a planner's plan
};

class KnownSteps {
 public:
  static constexpr std::size_t kMost = 64;
  using Schedule = std::pair<std::string, int>;  ///< name, number of stages

  /// Returns the record and plan that a step of `schedule` follows, or null. The pointer is valid
  /// until the next call of follow(), put(), forget() or clear().
  KnownStep* follow(const Schedule& schedule);
  /// Replaces the record of `schedule`. Beyond kMost records that were never followed the oldest of
  /// them is dropped, beyond kMost that were the one that was followed least recently.
  void put(const Schedule& schedule, StepRecord record, StepTurns turns = {});
  /// From now on a checkpoint of its steps is known to draw random numbers of the process.
  void note_draws(const Schedule& schedule);
  void forget(const Schedule& schedule);
  void forget_plans();
  void clear() { all_.clear(); }
  /// Whether each of the last kMost steps recorded and none followed an earlier step's record.
  bool are_all_new() const { return new_in_a_row_ >= kMost; }

 private:
  struct One {
    Schedule schedule;
    KnownStep step;
    bool was_followed = false;
  };
  void drop_first_beyond_most(bool was_followed);

  std::vector<One> all_;  ///< least recently put or followed first
  std::size_t new_in_a_row_ = 0;
};

/// How the steps of one model are planned.
struct StepPlanning {
  KnownSteps known = {};
  Planner planner = nullptr;   ///< null: plans are eager
  std::uint64_t planners = 0;  ///< so far: the same number on every rank
  RecomputeMode while_recording = RecomputeMode::kNone;
  std::shared_ptr<const StepPlan> followed = nullptr;  ///< by the last step that followed one
};

}  // namespace tessera::fsdp
