// Publisher: handles gradients between two backwards.
//
// At the end of a backward that reduces it agrees on the used parameters, sums over replicas, casts
// to the final dtype and sets `.grad` of the shards. When the next backward begins it takes over
// the changes that the user has made to them. [Note: unused], [Note: kept gradients] in
// publisher.cpp.
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
  /// `units`: those of the tree, in plan order.
  Publisher(const Groups& groups, Reducer& reducer, const std::vector<Unit*>& units)
      : groups_(groups), reducer_(reducer), units_(units) {}

  /// Puts the gradients that were reduced since the last call on the shards. Collective. `marks` go
  /// into the labels.
  void publish(const ModelControls& controls, const std::string& marks);
  /// Starts new sums in buckets whose gradients the user has cleared, where nothing is pending: on
  /// a device their memory is free for what comes before the next backward. Nothing may be under
  /// way.
  void forget_cleared();
  /// Takes over the gradients that the user changed, cleared or kept since. Errors: kContract,
  /// kUsage naming the parameter.
  void import_user_changes(const ModelControls& controls);
  /// Requires that the gradients on the shards are those that import_user_changes() has seen last.
  /// Errors: kUsage, naming `what` and the parameter.
  void require_as_seen(const char* what) const;
  /// Notes that the present sums are of losses of another scale.
  void rescaled() { rescaled_ = true; }
  /// Moves sums that the user can see to other memory, before a reduction into them that the end of
  /// this backward does not wait for: the user may read and write the published gradients
  /// meanwhile.
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
