#include "fsdp/agreed/known_steps.h"

#include <algorithm>

namespace tessera::fsdp {

KnownStep* KnownSteps::follow(const Schedule& schedule) {
  const auto found = std::ranges::find(all_, schedule, &One::schedule);
  if (found == all_.end()) return nullptr;
  found->was_followed = true;
  new_in_a_row_ = 0;
  std::rotate(found, found + 1, all_.end());
  return &all_.back().step;
}

void KnownSteps::put(const Schedule& schedule, StepRecord record) {
  forget(schedule);
  if (all_.size() >= kMost) {
    const auto oldest = std::ranges::find(all_, false, &One::was_followed);
    all_.erase(oldest == all_.end() ? all_.begin() : oldest);
  }
  all_.push_back({schedule, {.record = std::move(record)}});
  ++new_in_a_row_;
}

void KnownSteps::forget(const Schedule& schedule) {
  std::erase_if(all_, [&](const One& one) { return one.schedule == schedule; });
}

void KnownSteps::forget_plans() {
  for (auto& one : all_) one.step.plan.reset();
}

}  // namespace tessera::fsdp
