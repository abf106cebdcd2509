// The learning rate of a step: warm-up, then the decay of [lr_scheduler]. Pure.
#pragma once

#include <cstdint>

#include "train/config/config.h"

namespace tessera::train {

/// Steps count from 1. lr x step / warmup while step <= warmup; then from lr at the end of the
/// warm-up to lr x min_lr_factor at step `steps`, straight or along half a cosine.
double learning_rate(const LrSchedulerConfig& schedule, double lr, std::int64_t steps,
                     std::int64_t step);

}  // namespace tessera::train
