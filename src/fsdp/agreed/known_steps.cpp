#include "fsdp/agreed/known_steps.h"

#include <algorithm>

#include "base/hash.h"

namespace tessera::fsdp {

std::uint64_t StepTurns::hash() const {
  Hasher hash;
  for (const auto& stage : stages) {
    hash.add(stage.forward.value_or(-1)).add(stage.backward.value_or(-1));
  }
  return hash.add(std::int64_t{draws}).digest();
}

KnownStep* KnownSteps::follow(const Schedule& schedule) {
  const auto found = std::ranges::find(all_, schedule, &One::schedule);
  if (found == all_.end()) return nullptr;
  found->was_followed = true;
  new_in_a_row_ = 0;
  std::rotate(found, found + 1, all_.end());
  drop_first_beyond_most(/*was_followed=*/true);
  return &all_.back().step;
}

void KnownSteps::put(const Schedule& schedule, StepRecord record, StepTurns turns) {
  forget(schedule);
  all_.push_back({schedule, {.record = std::move(record), .turns = std::move(turns)}});
  drop_first_beyond_most(/*was_followed=*/false);
  ++new_in_a_row_;
}

void KnownSteps::drop_first_beyond_most(bool was_followed) {
  const auto count = std::ranges::count(all_, was_followed, &One::was_followed);
  if (static_cast<std::size_t>(count) <= kMost) return;
  all_.erase(std::ranges::find(all_, was_followed, &One::was_followed));
}

void KnownSteps::note_draws(const Schedule& schedule) {
  const auto found = std::ranges::find(all_, schedule, &One::schedule);
  if (found != all_.end()) found->step.turns.draws = true;
}

void KnownSteps::forget(const Schedule& schedule) {
  std::erase_if(all_, [&](const One& one) { return one.schedule == schedule; });
}

void KnownSteps::forget_plans() {
  for (auto& one : all_) one.step.plan.reset();
}

}  // namespace tessera::fsdp
