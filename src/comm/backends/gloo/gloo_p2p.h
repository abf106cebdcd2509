// Messages over Gloo: each is a send and a receive between two ranks, matched by a tag.
//
// [Note: message tags] c10d has 31 bits for a tag. At most 23 of them hold the numbers of the
// message that tell concurrent messages apart: direction, stage, micro-batch and tensor. How many
// bits these take depends on the step's P2PExtent; no two messages of a schedule share a tag. The
// other bits, at least 8, are a hash of everything on which both ends must agree, also step, sizes
// and dtype. Ends that differ wait: the pending messages of each rank are on the wait board, where
// the failure watch compares them (launch/peer_watch.h). Only the tensor itself is sent.
//
// Private to point_to_point.cpp, whose connections it uses.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "comm/backends/gloo/transport.h"
#include "comm/p2p.h"

namespace tessera::comm {

class P2PLog;
class MessagesInFlight;

class GlooP2P final : public P2P {
 public:
  /// `open` connects the ranks where they are not connected. Collective.
  GlooP2P(std::shared_ptr<Channel> channel, std::function<void()> open);
  ~GlooP2P() override;

  /// Makes Gloo release all memory, after a failure and before the connections are closed.
  /// Transfers that have not ended throw from now on. No caller may be waiting.
  void reset();

  /// Also called for a device's messages, which staged.h carries through the host.
  std::unique_ptr<Transfer> post(P2POp op) override;

 private:
  std::shared_ptr<P2PLog> log_with(int peer);

  const std::shared_ptr<Channel> channel_;
  const std::function<void()> open_;
  std::map<int, std::shared_ptr<P2PLog>> logs_;  ///< by index of the peer
  const std::shared_ptr<MessagesInFlight> in_flight_;
};

}  // namespace tessera::comm
