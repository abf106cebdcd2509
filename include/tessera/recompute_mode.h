// RecomputeMode: the activations that a checkpointed block drops between forward and backward, with
// the bytes that each mode keeps. Next: recompute.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The activations that a checkpointed block drops after its forward and computes again.
enum class RecomputeMode : std::uint8_t {
  kNone,       ///< none: a plain call
  kFull,       ///< all except its inputs
  kSelective,  ///< all except its inputs and the results of keep() (those of weight products)
};

/// The interface of a module whose forward passes recompute() to checkpoint(). Where it is a unit
/// without inner units, plans of steps may choose the mode (compile.h).
class Recomputable {
 public:
  virtual ~Recomputable() = default;
  /// Sets the mode from the next forward on; it overrides plans. none = the plan's, or kNone
  /// without a plan. The same on every rank.
  void set_recompute(std::optional<RecomputeMode> mode) { own_ = mode; }
  /// Returns the mode that set_recompute() has set.
  std::optional<RecomputeMode> own_recompute() const { return own_; }
  /// Returns the mode of the next forward.
  RecomputeMode recompute() const { return own_.value_or(planned_); }
  /// Sets the mode of the current step's plan; handles call it when steps begin and end.
  void follow_recompute(RecomputeMode mode) { planned_ = mode; }

 private:
  std::optional<RecomputeMode> own_;
  RecomputeMode planned_ = RecomputeMode::kNone;
};

/// Activations of a unit without parameters, in bytes of one micro-batch, by mode.
struct UnitActivations {
  std::string unit = {};       ///< name of the unit, as in messages
  std::int64_t none = 0;       ///< kept from its forward to its backward with kNone
  std::int64_t selective = 0;  ///< kept with kSelective
  std::int64_t full = 0;       ///< kept with kFull
  /// Bytes while its forward runs again and its backward runs, kept ones included, with kSelective.
  std::int64_t selective_again = 0;
  std::int64_t full_again = 0;  ///< the same with kFull
  bool operator==(const UnitActivations&) const = default;

  /// Returns the bytes that the mode keeps from forward to backward.
  std::int64_t kept(RecomputeMode mode) const {
    return mode == RecomputeMode::kNone ? none : mode == RecomputeMode::kFull ? full : selective;
  }
  /// Returns the bytes in the unit's backward.
  std::int64_t in_backward(RecomputeMode mode) const {
    if (mode == RecomputeMode::kNone) return none;
    return mode == RecomputeMode::kFull ? full_again : selective_again;
  }
};

/// Activations of a whole forward, in bytes of one micro-batch.
struct ForwardActivations {
  /// Outside of these units, from the first unit's forward to the last backward.
  std::int64_t outside = 0;
  std::int64_t after = 0;  ///< of operations after all units, at the end of the forward
  std::vector<UnitActivations> units = {};  ///< in the order of their forwards
  bool operator==(const ForwardActivations&) const = default;
};

}  // namespace tessera
