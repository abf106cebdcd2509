#include "tessera/loss_scale.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "tessera/error.h"

namespace tessera {
namespace {

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

void require_power_of_two(std::string_view name, double value) {
  TESSERA_CHECK(is_loss_scale(value), ErrorKind::kConfig, "grad_scaler.", name, ": found ", value,
                ", expected a power of two: gradients are divided by the scale again, and only then"
                " is nothing rounded; take a power of two near it");
}

}  // namespace

bool is_loss_scale(double scale) {
  return is_power_of_two(scale) && scale >= std::numeric_limits<float>::min() &&
         scale <= std::numeric_limits<float>::max();
}

bool LossScaleState::has_possible_counts() const {
  return good_steps >= 0 && good_steps < kMaxSteps && skipped_steps >= 0 &&
         skipped_steps < kMaxSteps;
}

void validate(const GradScalerOptions& options) {
  require_power_of_two("init_scale", options.init_scale);
  require_power_of_two("growth_factor", options.growth_factor);
  require_power_of_two("backoff_factor", options.backoff_factor);
  require_power_of_two("min_scale", options.min_scale);
  TESSERA_CHECK(options.growth_factor >= 1, ErrorKind::kConfig, "grad_scaler.growth_factor: found ",
                options.growth_factor, ", expected at least 1; 1 never grows");
  TESSERA_CHECK(options.backoff_factor < 1, ErrorKind::kConfig,
                "grad_scaler.backoff_factor: found ", options.backoff_factor,
                ", expected less than 1: a scale that stays would leave out the next step as well");
  TESSERA_CHECK(options.growth_interval >= 1, ErrorKind::kConfig,
                "grad_scaler.growth_interval: found ", options.growth_interval,
                ", expected at least 1; a large one never grows");
  TESSERA_CHECK(options.min_scale <= options.init_scale, ErrorKind::kConfig,
                "grad_scaler.min_scale: found ", options.min_scale,
                ", expected at most init_scale, ", options.init_scale,
                "; lower it or raise init_scale");
}

LossScale::LossScale(const GradScalerOptions& options) : options_(options) {
  validate(options);
  state_.scale = options.init_scale;
}

void LossScale::restore(const LossScaleState& state) {
  TESSERA_CHECK(is_loss_scale(state.scale) && state.scale >= options_.min_scale, ErrorKind::kConfig,
                "grad_scaler: found a run at scale ", state.scale,
                ", expected a power of two of at least min_scale, ", options_.min_scale,
                "; lower grad_scaler.min_scale");
  TESSERA_CHECK(state.has_possible_counts(), ErrorKind::kConfig, "grad_scaler: found a run after ",
                state.good_steps, " finite and ", state.skipped_steps,
                " skipped steps, expected from 0 to less than ", LossScaleState::kMaxSteps);
  state_ = state;
}

bool LossScale::can_shrink() const { return state_.scale > options_.min_scale; }

void LossScale::step_was_finite() {
  if (++state_.good_steps < options_.growth_interval) return;
  state_.good_steps = 0;
  const double grown = state_.scale * options_.growth_factor;
  if (is_loss_scale(grown)) state_.scale = grown;
}

void LossScale::step_was_skipped() {
  TESSERA_INVARIANT(can_shrink(), "a loss scale fell below its smallest");
  state_.scale = std::max(state_.scale * options_.backoff_factor, options_.min_scale);
  state_.good_steps = 0;
  ++state_.skipped_steps;
}

}  // namespace tessera
