// Controls: what users switch between steps, as a value.
//
// [Note: controls] Every switch changes which collectives are issued, or when, so it has to be the
// same on all ranks. Setting one does not communicate. What differs from the agreed plan is written
// into every label, which backends compare anyway, and into the hash that the order of a forward is
// compared by: ranks that differ find out at their next collective, which names the control.
// Pure: no torch header. Next: runtime.h (which acts by it), handle.cpp (who sets it).
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::fsdp {

/// Of one unit.
struct UnitControls {
  bool requires_sync = true;  ///< its gradients are reduced at the end of its backward
  bool reshard_after_forward = true;
  bool agreed_reshard_after_forward = true;  ///< when all ranks last compared their plans
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  std::optional<double> divide_factor;  ///< that the user set after sharding

  /// Its memory outlasts forwards that nobody differentiates, as it outlasts backwards.
  bool keeps_unsharded_in_eval() const { return !reshard_after_backward && !reshard_after_forward; }
  bool operator==(const UnitControls&) const = default;
};

/// Of all units together.
struct ModelControls {
  bool requires_replica_reduce = true;
  bool is_last_backward = true;
  bool defers_weight_gradients = false;
  /// Final gradients are divided by it: a power of two that losses are multiplied by.
  double loss_scale = 1.0;
  bool operator==(const ModelControls&) const = default;
};

struct Controls {
  struct OfUnit {
    std::string name;  ///< as messages show it
    UnitControls controls;
    std::vector<std::string> forward_prefetch, backward_prefetch;  ///< names; empty: agreed order
    bool operator==(const OfUnit&) const = default;
  };
  ModelControls model;
  std::vector<OfUnit> units;
  bool operator==(const Controls&) const = default;
};

/// Every control that is not as the plan was agreed, in words; "" for none.
std::string to_string(const Controls& controls);

}  // namespace tessera::fsdp
