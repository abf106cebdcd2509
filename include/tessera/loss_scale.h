// LossScale: the factor of a float16 loss, step by step. A value: it communicates nothing and knows
// no model. Pure.
//
// The rule is that of torch.amp.GradScaler, with two differences. Factors are powers of two, so
// that scaling rounds nothing. The scale has a minimum, below which a run would skip every step for
// ever. Next: grad_scaler.h, which applies it to a model.
#pragma once

#include <cstdint>

namespace tessera {

/// Options of the scale; all but growth_interval are powers of two.
struct GradScalerOptions {
  double init_scale = 65536.0;          ///< the scale of the first step
  double growth_factor = 2.0;           ///< at least 1; 1 = never grows
  double backoff_factor = 0.5;          ///< below 1
  std::int64_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
  double min_scale = 1.0;               ///< the least scale
  bool operator==(const GradScalerOptions&) const = default;
};

/// Checks options. Errors: kConfig naming the option, as grad_scaler.NAME.
void validate(const GradScalerOptions& options);

/// The state of a scale, as a checkpoint holds it.
struct LossScaleState {
  /// The bound of both counts; a state beyond it is refused.
  static constexpr std::int64_t kMaxSteps = std::int64_t{1} << 62;

  /// Returns whether both counts are those of a possible run.
  bool has_possible_counts() const;

  double scale = 1.0;              ///< the scale
  std::int64_t good_steps = 0;     ///< finite steps in a row, since the scale last changed
  std::int64_t skipped_steps = 0;  ///< steps that were not finite, in the whole run
  bool operator==(const LossScaleState&) const = default;
};

/// Returns whether `scale` is a power of two that float32 holds, so that quotients by it are exact.
bool is_loss_scale(double scale);

/// The rule by which the scale moves.
class LossScale {
 public:
  /// Starts at init_scale. Errors: as validate().
  explicit LossScale(const GradScalerOptions& options);

  /// Returns the scale.
  double value() const { return state_.scale; }
  /// Returns the state for a checkpoint.
  const LossScaleState& state() const { return state_; }
  /// Continues from a state. Errors: kConfig for a scale that is_loss_scale() refuses or that is
  /// below min_scale, and for negative counts.
  void restore(const LossScaleState& state);

  /// Returns whether the scale is above its minimum.
  bool can_shrink() const;
  /// Counts a step with finite gradients, and grows the scale after growth_interval of them. The
  /// scale does not grow beyond what float32 holds.
  void step_was_finite();
  /// Counts a skipped step and shrinks the scale; can_shrink() was true.
  void step_was_skipped();

 private:
  GradScalerOptions options_;
  LossScaleState state_;
};

}  // namespace tessera
