// Mailbox: messages between ranks that are threads, which the members of a group share.
//
// It is stricter than Gloo: a send ends when its receive was posted and the message has travelled
// for as long as a test says (test_hooks.h); data appear when one of the ends waits or asks; ends
// that differ are named at once, on both ranks, also for empty tensors. On devices the thread of an
// end that waits or asks launches the copy, on the streams of both ends.
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
  /// Ends all waits, after every rank's AbortFlag was marked.
  void wake_all();
  /// Drops the messages in flight: their tensors are not accessed any more.
  void reset();

 private:
  friend class MailboxEnd;
  friend class InProcessP2P;

  /// The sender and the receiver (ranks of the world), and the number of the message between them.
  struct Key {
    int sender;
    int receiver;
    P2PTag tag;
    auto operator<=>(const Key&) const = default;
  };
  struct Message;

  std::shared_ptr<Message> post(const Key& key, P2POp op);
  void match(Message& message) TESSERA_REQUIRES(mutex_);
  /// Whether the message has ended for the end of `op`; delivers it when its time has come. On a
  /// device: whether that is launched, up to the end's event.
  bool is_through(Message& message, const P2POp& op) TESSERA_REQUIRES(mutex_);
  void deliver(Message& message) TESSERA_REQUIRES(mutex_);
  /// Both return the event that ends the message for `op`; poll() returns none while it is in
  /// flight.
  Event wait_for(Message& message, const P2POp& op, std::chrono::milliseconds timeout,
                 const AbortFlag& abort_flag);
  std::optional<Event> poll(Message& message, const P2POp& op, const AbortFlag& abort_flag);
  /// Releases an end for which no caller waits any more. Orders `stream`, its caller's, after the
  /// message, at once or as soon as it is launched, before the message releases the tensor.
  void let_go(Message& message, const P2POp& op, const Stream& stream);
  /// "; it has posted ...": names what the other end of `message` has posted instead.
  std::string others_than(const Message& message, const P2POp& op) const TESSERA_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  base::Condition changed_;
  std::map<Key, std::shared_ptr<Message>> half_posted_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t generation_ TESSERA_GUARDED_BY(mutex_) = 0;
};

std::unique_ptr<P2P> open_mailbox(std::shared_ptr<Mailbox> mailbox, P2PPlace place,
                                  std::chrono::milliseconds timeout);

}  // namespace tessera::comm
