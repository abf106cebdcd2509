// RecomputeMode: what a checkpointed block forgets between forward and backward; who may be told so,
// and what each mode keeps. Next: recompute.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

enum class RecomputeMode : std::uint8_t {
  kNone,       ///< nothing: a plain call
  kFull,       ///< all but its inputs
  kSelective,  ///< all but its inputs and what keep() was given: the results of weight products
};

/// Of a module whose forward goes through checkpoint() with recompute() as its mode. Where it is a
/// unit that has no other units inside, plans of steps may choose the mode (compile.h).
class Recomputable {
 public:
  virtual ~Recomputable() = default;
  /// What its user wants, which binds plans; none: theirs holds, without one kNone. From the next
  /// forward on. On every rank the same.
  void set_recompute(std::optional<RecomputeMode> mode) { own_ = mode; }
  std::optional<RecomputeMode> own_recompute() const { return own_; }
  RecomputeMode recompute() const { return own_.value_or(planned_); }
  /// What the plan of the step under way has chosen: called by handles, as steps begin and end.
  void follow_recompute(RecomputeMode mode) { planned_ = mode; }

 private:
  std::optional<RecomputeMode> own_;
  RecomputeMode planned_ = RecomputeMode::kNone;
};

/// What a unit holds from its forward to its backward beside parameters, in bytes of one
/// micro-batch, by mode.
struct UnitActivations {
  std::string unit = {};  ///< as messages name it
  std::int64_t none = 0, selective = 0, full = 0;
  /// While its forward is computed again and its backward runs, what was kept included.
  std::int64_t selective_again = 0, full_again = 0;
  bool operator==(const UnitActivations&) const = default;

  std::int64_t kept(RecomputeMode mode) const {
    return mode == RecomputeMode::kNone ? none : mode == RecomputeMode::kFull ? full : selective;
  }
  std::int64_t in_backward(RecomputeMode mode) const {
    if (mode == RecomputeMode::kNone) return none;
    return mode == RecomputeMode::kFull ? full_again : selective_again;
  }
};

/// Of a whole forward.
struct ForwardActivations {
  std::int64_t outside = 0;  ///< from the first of these units' forwards to the last backward
  std::int64_t after = 0;   ///< of what comes behind all of them: there when forward has ended
  std::vector<UnitActivations> units = {};
  bool operator==(const ForwardActivations&) const = default;
};

}  // namespace tessera
