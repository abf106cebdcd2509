// Messages over Gloo: each a send and a receive between two ranks, matched by a tag.
//
// [Note: message tags] c10d has 31 bits for one. Those by which messages that are under way at the
// same time differ are in it as they are (direction, stage, micro-batch, tensor: at most 23 bits, as
// many as the step's MailExtent needs), so that two of a schedule never share one; the others, at
// least 8, are a hash over all that both ends must agree on: step, sizes and dtype too. Ends that
// differ wait: what each rank has under way stands on the wait board, where the failure watch finds
// it (launch/peer_watch.h). Nothing is sent beside the tensor itself.
//
// Private to point_to_point.cpp, whose connections it uses.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "comm/backends/gloo/exchange.h"
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
