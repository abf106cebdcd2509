// Publisher: handles gradients between two backwards.
//
// At the end of a backward that reduces, it agrees on the used parameters, sums over replicas,
// casts to the final dtype and sets `.grad` of the shards. When the next backward begins it takes
// over the user's changes to these gradients. [Note: unused], [Note: kept gradients] in
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

  /// Sets `.grad` of the shards from the gradients that were reduced since the last call.
  /// Collective. `marks` go into the labels.
  void publish(const ModelControls& controls, const std::string& marks);
  /// Starts new sums in buckets whose gradients the user has cleared, unless something is pending
  /// there. On a device this frees their memory for the next forward. Nothing may be under way.
  void forget_cleared();
  /// Takes over the gradients that the user changed, cleared or kept since they were published.
  /// Errors: kContract, kUsage naming the parameter.
  void import_user_changes(const ModelControls& controls);
  /// Requires that the gradients on the shards are those that import_user_changes() has seen last.
  /// Errors: kUsage, naming `what` and the parameter.
  void require_as_seen(const char* what) const;
  /// Notes that the loss scale has changed: the present sums are of losses at the old scale.
  void rescaled() { rescaled_ = true; }
  /// Moves to other memory the sums of which published gradients are views. Called before a
  /// reduction that the end of this backward does not wait for: the user may read and write those
  /// gradients meanwhile.
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
