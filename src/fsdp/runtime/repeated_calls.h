// RepeatedCalls: forwards of units that run again inside a backward, by a checkpoint which puts what
// the second run saves in the places of what the first one saved (non-reentrant checkpoints of
// torch), against what the first run called.
//
// The second run has no record of its own: its graph is dropped, and the backward goes through the
// nodes of the first. So a call in it has to repeat a call of a forward that the backward under way
// goes through, and the calls of one run have to follow each other as they did there. Nobody says
// where a run begins: it may do so at any forward of the unit whose backward has not ended. Two
// calls are of one run where the same hooks on saved tensors are set and the same node runs. Next:
// recompute_scopes.h, for checkpoints of our own.
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
  /// A position of the trace of a forward that the backward under way goes through.
  struct Place {
    std::shared_ptr<Segment> segment;
    std::size_t position = 0;
  };
  enum class Verdict : std::uint8_t {
    kRepeats,
    kUnknown,      ///< no forward that the backward goes through made such a call
    kWithoutGrad,  ///< one did, without grad mode
    kOtherOrder,   ///< the run has come to other calls before
  };

  /// Whether a checkpoint saves what runs here: hooks on saved tensors are set, as they are in its
  /// second run.
  static bool is_under_way();
  /// A call of `unit`, with grad mode as it is here. `segments`: of what backward goes through.
  Verdict follow(UnitId unit, const std::vector<std::shared_ptr<Segment>>& segments);
  /// The units that might have come where follow() said kOtherOrder; empty: none.
  std::vector<UnitId> expected() const;
  /// No run is under way any more.
  void forget();

 private:
  bool is_same_run();
  Verdict begin(UnitId unit, const std::vector<std::shared_ptr<Segment>>& segments);

  std::optional<c10::SafePyObject> hooks_;  // held, so that its address is no other's
  const torch::autograd::Node* node_ = nullptr;
  std::vector<Place> places_;  // where the last call of the run may stand
};

}  // namespace tessera::fsdp
