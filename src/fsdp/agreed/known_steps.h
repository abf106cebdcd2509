// KnownSteps keeps what steps of each schedule have entered, with the plan that the last one
// followed.
//
// A program has two or three schedules, which it names alike in each step; room is for dozens. A
// program that gives each step another name has records that no step follows: they make room for
// each other, and never for those that are followed.
// Next: ../runtime/open_step.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/agreed/order.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

/// What makes a plan of: all of it agreed between ranks.
struct PlanInputs {
  std::vector<PlanUnit> units;
  PlanChoices choices;  ///< eager ones
  PlanOrder order = PlanOrder::kAny;
  bool operator==(const PlanInputs&) const = default;
};

struct KnownStep {
  StepRecord record;
  PlanInputs inputs = {};
  std::shared_ptr<const StepPlan> plan = nullptr;  ///< null: none yet
  std::string marks = {};                          ///< behind others in labels, of a planner's plan
};

class KnownSteps {
 public:
  static constexpr std::size_t kMost = 64;
  using Schedule = std::pair<std::string, int>;  ///< and the number of stages

  /// What a step of that schedule follows, or null. It stays until the next call of follow(), put(),
  /// forget() or clear().
  KnownStep* follow(const Schedule& schedule);
  /// Takes the place of what is known of that schedule. Of more than kMost that no step has followed
  /// the oldest one goes; of more than kMost that were, the one that was followed longest ago.
  void put(const Schedule& schedule, StepRecord record);
  void forget(const Schedule& schedule);
  void forget_plans();
  void clear() { all_.clear(); }
  /// Whether the last kMost steps were all recorded, and none followed what another one had.
  bool are_all_new() const { return new_in_a_row_ >= kMost; }

 private:
  struct One {
    Schedule schedule;
    KnownStep step;
    bool was_followed = false;
  };
  void drop_first_beyond_most(bool was_followed);

  std::vector<One> all_;  ///< the last one that was put or followed behind the others
  std::size_t new_in_a_row_ = 0;
};

}  // namespace tessera::fsdp
