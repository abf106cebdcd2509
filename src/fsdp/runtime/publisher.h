// Publisher: what happens to gradients between two backwards.
//
// At the end of a backward that reduces: who used what, the sum over replicas, the final cast,
// `.grad` of the shards. At the beginning of the next one: what the user did to them meanwhile.
// [Note: unused], [Note: kept gradients] in publisher.cpp.
#pragma once

#include <string>
#include <vector>

#include "comm/queue.h"
#include "fsdp/agreed/controls.h"
#include "fsdp/runtime/bucket.h"
#include "fsdp/runtime/reducer.h"

namespace tessera::fsdp {

class Unit;
struct Parameter;

class Publisher {
 public:
  /// `units` of the tree, in plan order.
  Publisher(const Groups& groups, Reducer& reducer, const std::vector<Unit*>& units)
      : groups_(groups), reducer_(reducer), units_(units) {}

  /// Gradients that were reduced since the last time appear on the shards. Collective. `marks` go
  /// into the labels.
  void publish(const ModelControls& controls, const std::string& marks);
  /// Begins new sums in buckets of which the user has cleared all, and nothing waits: on a device
  /// their memory is free for what comes before the next backward. Nothing may be under way.
  void forget_cleared();
  /// What users changed, cleared or kept since. Errors: kContract, kUsage naming the parameter.
  void import_user_changes(const ModelControls& controls);
  /// What stands on the shards is what import_user_changes() has seen last. Errors: kUsage, naming
  /// `what` and the parameter.
  void require_as_seen(const char* what) const;
  /// Sums that stand are of losses of another scale.
  void rescaled() { rescaled_ = true; }
  /// Before a reduction into the sums that nobody waits for at the end of this backward: what is
  /// shown may be read and written by the user meanwhile.
  static void leave_shown_sums(const Unit& unit);

 private:
  void agree_on_used();
  void import_changed(Unit& unit, Parameter& parameter, const ModelControls& controls);
  void leave_kept_sums(Unit& unit);

  const Groups& groups_;
  Reducer& reducer_;
  const std::vector<Unit*>& units_;
  bool rescaled_ = false;
};

}  // namespace tessera::fsdp
