// LossScale: what a float16 loss is multiplied by, step by step. A value: it communicates nothing
// and knows no model. Pure.
//
// The rule is that of torch.amp.GradScaler; two things differ. Factors are powers of two, so that
// scaling rounds nothing. A scale has a floor: below it a run would leave out every step for ever.
// Next: grad_scaler.h, which applies it to a model.
#pragma once

#include <cstdint>

namespace tessera {

/// All but growth_interval are powers of two.
struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;           ///< at least 1; 1 = never grows
  double backoff_factor = 0.5;          ///< below 1
  std::int64_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
  double min_scale = 1.0;
  bool operator==(const GradScalerOptions&) const = default;
};

/// Errors: kConfig naming the option, as grad_scaler.NAME.
void validate(const GradScalerOptions& options);

/// Where a run stands: all that a checkpoint has to hold.
struct LossScaleState {
  /// No run has as many steps; a state that says so is refused.
  static constexpr std::int64_t kMaxSteps = std::int64_t{1} << 62;

  /// Counts that a run can have had, and go on from.
  bool has_possible_counts() const;

  double scale = 1.0;
  std::int64_t good_steps = 0;     ///< finite steps in a row, since the scale last changed
  std::int64_t skipped_steps = 0;  ///< left out so far
  bool operator==(const LossScaleState&) const = default;
};

/// A scale is a power of two that float32 holds: quotients by it are exact.
bool is_loss_scale(double scale);

class LossScale {
 public:
  /// Errors: as validate().
  explicit LossScale(const GradScalerOptions& options);

  double value() const { return state_.scale; }
  const LossScaleState& state() const { return state_; }
  /// Errors: kConfig for a scale that is none, or is below the smallest; for negative counts.
  void restore(const LossScaleState& state);

  /// Whether a step that is not finite still has a smaller scale to go to.
  bool can_shrink() const;
  /// The gradients were finite: good_steps + 1, and growth where they are enough. A scale that
  /// float32 does not hold is not grown to.
  void step_was_finite();
  /// They were not, and the step is left out. can_shrink() was true.
  void step_was_skipped();

 private:
  GradScalerOptions options_;
  LossScaleState state_;
};

}  // namespace tessera
