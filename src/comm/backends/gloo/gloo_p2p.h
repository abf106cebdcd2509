// Messages over Gloo: each a send and a receive between two ranks, matched by a tag.
//
// [Note: message tags] c10d has 31 bits for a tag. At most 23 of them are the numbers by which
// concurrent messages differ, as they are: direction, stage, micro-batch and tensor. How many bits
// these take depends on the step's P2PExtent; no two messages of a schedule share a tag. The other
// bits, at least 8, are a hash over all that both ends must agree on, also step, sizes and dtype.
// Ends that differ wait: the messages that each rank has pending are on the wait board, where the
// failure watch compares them (launch/peer_watch.h). Nothing is sent but the tensor itself.
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
class PostedOps;

class GlooP2P final : public P2P {
 public:
  /// `open` connects the ranks where they are not. Collective.
  GlooP2P(std::shared_ptr<Channel> channel, std::function<void()> open);
  ~GlooP2P() override;

  /// After a failure, before the connections are closed: Gloo lets go of all memory, and transfers
  /// that are not through throw from now on. Nothing may be waited for.
  void reset();

  /// Also for who carries a op through it (staged.h).
  std::unique_ptr<Transfer> post(P2POp op) override;

 private:
  std::shared_ptr<P2PLog> log_with(int peer);

  const std::shared_ptr<Channel> channel_;
  const std::function<void()> open_;
  std::map<int, std::shared_ptr<P2PLog>> logs_;  ///< by index of the peer
  const std::shared_ptr<PostedOps> posted_;
};

}  // namespace tessera::comm
