#include "train/report/replayed_calls.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::train {

ReplayCalls ReplayedCalls::of_step() {
  auto now = replay_calls(model_);
  auto since = now - before_;
  before_ = std::move(now);
  return since;
}

std::string ReplayedCalls::as_text() const {
  const auto calls = replay_calls(model_);
  std::string text =
      concat("regions: ", calls.replayed, " calls replayed, ", calls.recorded, " recorded");
  for (const auto& [why, count] : calls.eager) text += concat(", ", count, " eager (", why, ")");
  return text;
}

}  // namespace tessera::train
