// Messages over Gloo: each a send and a receive between two ranks, matched by a tag.
//
// [Note: message tags] c10d has 31 bits for a tag. At most 23 of them are the numbers by which
// concurrent messages differ, as they are: direction, stage, micro-batch and tensor. How many bits
// these take depends on the step's MailExtent; no two messages of a schedule share a tag. The other
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
#include "comm/mail.h"

namespace tessera::comm {

class MailLog;
class MailDesk;

class GlooMail final : public Mail {
 public:
  /// `open` connects the ranks where they are not. Collective.
  GlooMail(std::shared_ptr<Channel> channel, std::function<void()> open);
  ~GlooMail() override;

  /// After a failure, before the connections are closed: Gloo lets go of all memory, and transfers
  /// that are not through throw from now on. Nothing may be waited for.
  void reset();

  /// Also for who carries a letter through it (staged.h).
  std::unique_ptr<Transfer> post(Letter letter) override;

 private:
  std::shared_ptr<MailLog> log_with(int peer);

  const std::shared_ptr<Channel> channel_;
  const std::function<void()> open_;
  std::map<int, std::shared_ptr<MailLog>> logs_;  ///< by index of the peer
  const std::shared_ptr<MailDesk> desk_;
};

}  // namespace tessera::comm
