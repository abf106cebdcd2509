#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera::train {

double learning_rate(const LrSchedulerConfig& schedule, double lr, std::int64_t steps,
                     std::int64_t step) {
  const std::int64_t warmup = schedule.warmup_steps;
  if (step <= warmup) return lr * static_cast<double>(step) / static_cast<double>(warmup);
  if (schedule.decay == LrDecay::kConstant) return lr;
  const double done =
      std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(steps - warmup));
  const double left = schedule.decay == LrDecay::kLinear
                          ? 1.0 - done
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return lr * (schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * left);
}

}  // namespace tessera::train
