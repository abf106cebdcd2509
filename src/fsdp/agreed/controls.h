// Controls: what users switch between steps, as a value.
//
// [Note: controls] Every switch changes which collectives are issued, or when, so it has to be the
// same on all ranks. Setting one does not communicate. Settings that differ from the agreed plan
// are written into every label, which backends compare anyway, and into the hash by which the order
// of a forward is compared: ranks that differ get an error at their next collective, which names
// the control. Pure: no torch header. Next: runtime.h (which acts on it), handle.cpp (which sets
// it).
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::fsdp {

/// The controls of one unit.
struct UnitControls {
  bool requires_sync = true;  ///< its gradients are reduced at the end of its backward
  bool reshard_after_forward = true;
  bool agreed_reshard_after_forward = true;  ///< its value when ranks last compared plans
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  std::optional<double> divide_factor;  ///< where the user set it after sharding

  /// Whether the unit stays unsharded after a forward without backward, as it does after backwards.
  bool keeps_unsharded_in_eval() const { return !reshard_after_backward && !reshard_after_forward; }
  bool operator==(const UnitControls&) const = default;
};

/// The controls of the whole model.
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
    std::vector<std::string> forward_prefetch, backward_prefetch;  ///< empty: agreed order
    bool operator==(const OfUnit&) const = default;
  };
  ModelControls model;
  std::vector<OfUnit> units;
  bool operator==(const Controls&) const = default;
};

/// Returns every control that differs from the agreed plan, as text; "" for none.
std::string to_string(const Controls& controls);

}  // namespace tessera::fsdp
