// Axis: one axis of a mesh as activations cross it: who is on it, and in which dtype sums travel.
//
// Its group is issued to from the rank's own thread and from the one that runs its backward, never
// at the same time, and never from the queue of sharding collectives. Next: transitions.h.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

#include "comm/group.h"

namespace tessera::parallel {

class Axis {
 public:
  Axis() = default;  ///< one rank: every transition is the identity
  /// `sums`: the dtype of addends on the wire; none = the tensor's own.
  Axis(std::shared_ptr<comm::Group> group, std::string name,
       std::optional<at::ScalarType> sums = std::nullopt);

  int size() const { return group_ ? group_->size() : 1; }
  int rank() const { return group_ ? group_->rank() : 0; }
  const std::string& name() const { return name_; }
  std::optional<at::ScalarType> sums() const { return sums_; }

  /// Runs one collective to its end, on this thread. More than one rank. Collective. Errors: kComm.
  void run(comm::Op op, const char* what) const;

 private:
  std::shared_ptr<comm::Group> group_;
  std::string name_;
  std::optional<at::ScalarType> sums_;
};

}  // namespace tessera::parallel
