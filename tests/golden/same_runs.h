// Two runs that have to be the same bit for bit, for any plans of their steps.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "golden/layouts.h"
#include "models/model_spec.h"

namespace tessera::golden {

/// Losses, norms, what metrics say of scales, routers and experts, weights after `step`.
void expect_same(const TrainingRun& found, const TrainingRun& expected, std::int64_t step);

/// On every rank, and what the others were; on devices none.
void expect_replayed(const TrainingRun& run);

/// A loss of routers in odd runs, a bias on the choice of experts in even ones: not where there are
/// no experts.
void balance_experts(train::Config& config, const models::ModelSpec& spec, unsigned number);

}  // namespace tessera::golden
