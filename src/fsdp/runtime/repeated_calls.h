// RepeatedCalls: checks forwards of units that run again inside a backward, in a non-reentrant
// checkpoint of torch, against the calls of the first run. Such a checkpoint replaces the tensors
// that the first run saved by those that the second run saves.
//
// The second run is not recorded: its graph is dropped, and the backward goes through the nodes of
// the first run. So each call of the second run has to repeat a call of a forward that the backward
// under way goes through, in the same order. It is not known where a run begins: its first call may
// repeat any forward of that unit whose backward has not ended. Two calls belong to the same run if
// the same hooks on saved tensors are set and the same autograd node runs. Next:
// recompute_scopes.h, for tessera::checkpoint.
#pragma once

#include <c10/core/SafePyObject.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/runtime/forwards.h"

namespace tessera::fsdp {

class RepeatedCalls {
 public:
  /// A position in the trace of a forward that the backward under way goes through.
  struct Place {
    std::shared_ptr<Segment> segment;
    std::size_t position = 0;
  };
  enum class Verdict : std::uint8_t {
    kRepeats,
    kUnknown,      ///< no forward that the backward goes through made such a call
    kWithoutGrad,  ///< such a call was made, but without grad mode
    kOtherOrder,   ///< the first run made another call at this place
  };

  /// Whether hooks on saved tensors are set here, as they are in the second run of a checkpoint.
  static bool is_under_way();
  /// Checks a call of `unit`, with the current grad mode. `segments`: those that the backward goes
  /// through.
  Verdict follow(UnitId unit, const std::vector<std::shared_ptr<Segment>>& segments);
  /// Returns the units of which a call was possible where follow() returned kOtherOrder; none: no
  /// call was.
  std::vector<UnitId> expected() const;
  /// Ends the run under way.
  void forget();

 private:
  bool is_same_run();
  Verdict begin(UnitId unit, const std::vector<std::shared_ptr<Segment>>& segments);

  std::optional<c10::SafePyObject> hooks_;  // held, so that its address stays unique
  const torch::autograd::Node* node_ = nullptr;
  std::vector<Place> places_;  // possible positions of the last call of the run
};

}  // namespace tessera::fsdp
