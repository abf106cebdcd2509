// Connections: the peers of a group that this rank is connected to, each since it was first needed.
//
// Gloo's lazy devices connect at the first transfer between two ranks, and the call that posts it
// blocks until the other rank's does, beyond every timeout if that never comes. So the first
// transfers are one byte each way, posted by a thread that nobody has to wait for; a wait for it is
// a wait like any other, with a deadline, a name for the failure watch, and an end when the World
// is poisoned. Collective: whom one rank connects to, connects to it, since both are about to run
// the same collective. Private to point_to_point.cpp.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/point_to_point.h"

namespace tessera::comm {

class Connections {
 public:
  /// Connects to those of `peers` that it is not connected to, for the entry `sequence` of the log.
  /// Errors: PeerLost naming the rank that did not come within the channel's timeout.
  void require(const std::vector<int>& peers, const ChannelOptions& channel,
               const c10::intrusive_ptr<c10d::Backend>& backend, const IssueLog& log,
               std::uint64_t sequence);
  void clear() { connected_.clear(); }

 private:
  std::vector<bool> connected_;
};

}  // namespace tessera::comm
