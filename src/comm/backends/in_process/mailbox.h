// Messages between ranks that are threads: a mailbox that the members of a group share.
//
// Stricter than Gloo: a send ends when its receive was posted and the message has been on its way
// for as long as a test says (test_hooks.h), data appear when one of the ends waits or asks, and
// ends that differ are named at once, on both; those of empty tensors, too. On devices the copy is
// launched when one of the ends waits or asks, on the streams of both, by its thread.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "comm/p2p.h"
#include "launch/abort_flag.h"

namespace tessera::comm {

/// Threads: any.
class Mailbox {
 public:
  /// Ends all waits (after every rank's AbortFlag was marked).
  void wake_all();
  /// Messages under way are lost: their tensors are not accessed any more.
  void reset();

 private:
  friend class MailboxEnd;
  friend class InProcessP2P;

  /// Sender and receiver (of the world), and which of their messages.
  struct Key {
    int sender;
    int receiver;
    P2PTag tag;
    auto operator<=>(const Key&) const = default;
  };
  struct Message;

  std::shared_ptr<Message> post(const Key& key, P2POp op);
  void match(Message& message) TESSERA_REQUIRES(mutex_);
  /// Whether it is through for the end of `op`; delivers it when its time has come. On a device:
  /// whether that is launched, up to the end's event.
  bool is_through(Message& message, const P2POp& op) TESSERA_REQUIRES(mutex_);
  void deliver(Message& message) TESSERA_REQUIRES(mutex_);
  /// Both return the event behind which the end of `op` is through; poll() none: it is not yet.
  Event wait_for(Message& message, const P2POp& op, std::chrono::milliseconds timeout,
                 const AbortFlag& abort_flag);
  std::optional<Event> poll(Message& message, const P2POp& op, const AbortFlag& abort_flag);
  /// Nobody will wait for this end any more: `stream`, its caller's, is ordered after the message all the
  /// same, at once or as soon as it is launched, before the message lets go of the tensor.
  void let_go(Message& message, const P2POp& op, const Stream& stream);
  /// "; it has posted ...": what the other end of `message` waits with in its place.
  std::string others_than(const Message& message, const P2POp& op) const TESSERA_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  base::Condition changed_;
  std::map<Key, std::shared_ptr<Message>> half_posted_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t generation_ TESSERA_GUARDED_BY(mutex_) = 0;
};

std::unique_ptr<P2P> open_mailbox(std::shared_ptr<Mailbox> mailbox, P2PPlace place,
                                  std::chrono::milliseconds timeout);

}  // namespace tessera::comm
