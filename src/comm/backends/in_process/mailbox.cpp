#include "comm/backends/in_process/mailbox.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "base/test_hooks.h"
#include "tessera/error.h"

namespace tessera::comm {

/// A message and its two ends. Guarded by the mailbox's mutex.
struct Mailbox::Message {
  Message(const Key& what, std::uint64_t when) : key(what), generation(when) {}

  const Key key;
  const std::uint64_t generation;
  /// One end as it was posted; the events and streams are for devices.
  struct End {
    P2POp op;
    Event through = {};   // ends the message
    Stream left_by = {};  // of a caller that released it before that
  };
  std::optional<End> sent;
  std::optional<End> received;
  bool buffered = false;
  bool matched = false;
  bool delivered = false;
  std::chrono::steady_clock::time_point arrives;
  std::string failure;

  std::optional<End>& end_of(const P2POp& op) { return op.sends() ? sent : received; }
};

namespace {

/// Copies what is sent. On a device: on the op's stream, on which it is to be freed, too.
at::Tensor buffered_copy(const P2POp& op) {
  op.posted.block(op.stream, EventSite::kP2PPost);
  const StreamScope there(op.stream);
  const c10::AutoGradMode no_grad(false);
  return op.tensor.clone();
}

/// Copies on the receiver's stream; between two devices the sender's stream is ordered, too.
Event launch_copy(const P2POp& sent, const P2POp& received) {
  const std::array streams{received.stream, sent.stream};
  for (const Stream& stream : streams) {
    for (const P2POp* end : {&sent, &received}) end->posted.block(stream, EventSite::kP2PPost);
  }
  {
    const StreamsScope here(streams);
    const c10::AutoGradMode no_grad(false);
    received.tensor.copy_(sent.tensor, /*non_blocking=*/true);
  }
  Event end;
  end.record(received.stream, EventSite::kP2PEnd);
  return end;
}

}  // namespace

void Mailbox::wake_all() {
  const base::Lock lock(mutex_);
  changed_.notify_all();
}

void Mailbox::reset() {
  const base::Lock lock(mutex_);
  half_posted_.clear();
  ++generation_;
  changed_.notify_all();
}

std::shared_ptr<Mailbox::Message> Mailbox::post(const Key& key, P2POp op) {
  const auto buffers = test_hooks::buffered_messages.get();
  const base::Lock lock(mutex_);
  auto& half = half_posted_[key];
  if (!half) half = std::make_shared<Message>(key, generation_);
  const auto message = half;
  auto& end = message->end_of(op);
  TESSERA_INVARIANT(!end, to_string(op), ": found it posted already, expected a new tag");
  Event through;
  if (op.sends() && buffers && (*buffers)()) {
    message->buffered = true;
    op.tensor = buffered_copy(op);
    op.posted.record(op.stream, EventSite::kP2PPost);
    through.record(op.stream, EventSite::kP2PEnd);
  }
  end = {std::move(op), std::move(through)};
  if (message->sent && message->received) {
    half_posted_.erase(key);
    match(*message);
  }
  return message;
}

void Mailbox::match(Message& message) {
  const Key& key = message.key;
  message.matched = true;
  message.arrives = std::chrono::steady_clock::now();
  const auto delay = test_hooks::message_delay.get();
  if (delay) message.arrives += (*delay)(key.tag);
  const P2POp& sent = message.sent->op;
  const P2POp& received = message.received->op;
  const at::Tensor& from = sent.tensor;
  const at::Tensor& to = received.tensor;
  if (from.sizes() != to.sizes() || from.scalar_type() != to.scalar_type()) {
    const bool sender_first = key.sender < key.receiver;
    message.failure = concat("ranks disagree: rank ", std::min(key.sender, key.receiver),
                             " issues ", to_string(sender_first ? sent : received), " but rank ",
                             std::max(key.sender, key.receiver), " issues ",
                             to_string(sender_first ? received : sent));
  }
  changed_.notify_all();
}

bool Mailbox::is_through(Message& message, const P2POp& op) {
  if (message.delivered) return true;
  if (message.generation != generation_) throw lost_in_recovery(op);
  if (!message.failure.empty()) throw Error(ErrorKind::kComm, message.failure);
  if (op.sends() && message.buffered) return true;
  if (!message.matched || std::chrono::steady_clock::now() < message.arrives) return false;
  deliver(message);
  message.delivered = true;
  // Each end may be held for long, but not with the other end's memory.
  message.sent->op.tensor.reset();
  message.received->op.tensor.reset();
  changed_.notify_all();
  return true;
}

void Mailbox::deliver(Message& message) {
  Message::End& sent = *message.sent;
  Message::End& received = *message.received;
  const at::Tensor& from = sent.op.tensor;
  if (!received.op.stream) {
    if (from.nbytes() == 0) return;
    std::memcpy(received.op.tensor.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    return;
  }
  received.through = launch_copy(sent.op, received.op);
  if (message.buffered) {
    received.through.block(sent.op.stream, EventSite::kP2PEnd);
  } else {
    sent.through = received.through;
  }
  for (const Message::End* end : {&sent, &received}) {
    end->through.block(end->left_by, EventSite::kP2PEnd);
  }
}

void Mailbox::let_go(Message& message, const P2POp& op, const Stream& stream) {
  const base::Lock lock(mutex_);
  Message::End& end = *message.end_of(op);
  end.through.block(stream, EventSite::kP2PEnd);
  if (!message.delivered) end.left_by = stream;
}

std::string Mailbox::others_than(const Message& message, const P2POp& op) const {
  constexpr int kNamed = 4;
  std::string text;
  int named = 0;
  for (const auto& [key, half] : half_posted_) {
    const auto& other = op.sends() ? half->received : half->sent;
    const bool same_way = key.sender == message.key.sender && key.receiver == message.key.receiver;
    if (!same_way || !other || ++named > kNamed) continue;
    text += concat(text.empty() ? "; it has posted " : " and ", to_string(other->op));
  }
  return named > kNamed ? concat(text, " and ", named - kNamed, " more") : text;
}

Event Mailbox::wait_for(Message& message, const P2POp& op, std::chrono::milliseconds timeout,
                        const AbortFlag& abort_flag) {
  using Clock = std::chrono::steady_clock;
  const auto patience = abort_flag.patience.of(timeout);
  const auto deadline = Clock::now() + patience;
  base::Lock lock(mutex_);
  base::InterruptTimer timer;
  while (!is_through(message, op)) {
    if (base::may_ask_interrupt()) {
      lock.unlock();
      abort_flag.ask_interrupt(timer);
      lock.lock();
      if (is_through(message, op)) break;
    }
    if (abort_flag.is_set()) abort_flag.raise(to_string(op));
    const auto now = Clock::now();
    const bool on_its_way = message.matched;
    if (!on_its_way && now >= deadline) {
      throw LostRank(concat(waited_in_vain(op, patience, op.peer_rank, abort_flag.patience),
                            others_than(message, op)));
    }
    const auto left = (on_its_way ? message.arrives : deadline) - now;
    const auto next_question = Clock::duration(base::kAsksEvery);
    changed_.wait_for(lock, base::may_ask_interrupt() ? std::min(left, next_question) : left,
                      [&]() TESSERA_REQUIRES(mutex_) {
                        return abort_flag.is_set() || message.delivered ||
                               message.matched != on_its_way || message.generation != generation_;
                      });
  }
  return message.end_of(op)->through;
}

std::optional<Event> Mailbox::poll(Message& message, const P2POp& op, const AbortFlag& abort_flag) {
  const base::Lock lock(mutex_);
  if (is_through(message, op)) return message.end_of(op)->through;
  if (abort_flag.is_set()) abort_flag.raise(to_string(op));
  return std::nullopt;
}

/// One end of a message in the mailbox.
class MailboxEnd final : public PostedOp {
 public:
  MailboxEnd(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Mailbox::Message> message, P2POp op,
             std::chrono::milliseconds timeout, std::shared_ptr<AbortFlag> abort_flag)
      : PostedOp(std::move(op)),
        mailbox_(std::move(mailbox)),
        message_(std::move(message)),
        timeout_(timeout),
        abort_flag_(std::move(abort_flag)) {}

  Event finish() override { return mailbox_->wait_for(*message_, op_, timeout_, *abort_flag_); }
  std::optional<Event> poll() override { return mailbox_->poll(*message_, op_, *abort_flag_); }
  void let_go(const Stream& stream) override { mailbox_->let_go(*message_, op_, stream); }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<Mailbox::Message> message_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<AbortFlag> abort_flag_;
};

class InProcessP2P final : public P2P {
 public:
  InProcessP2P(std::shared_ptr<Mailbox> mailbox, P2PPlace place, std::chrono::milliseconds timeout)
      : P2P(std::move(place)), mailbox_(std::move(mailbox)), timeout_(timeout) {}

 private:
  std::unique_ptr<Transfer> post(P2POp op) override {
    const int self = place().members[static_cast<std::size_t>(rank())];
    const Mailbox::Key key{op.sends() ? self : op.peer_rank, op.sends() ? op.peer_rank : self,
                           op.tag};
    auto message = mailbox_->post(key, op);
    return std::make_unique<Transfer>(
        place(), std::make_shared<MailboxEnd>(mailbox_, std::move(message), std::move(op), timeout_,
                                              place().abort_flag));
  }

  const std::shared_ptr<Mailbox> mailbox_;
  const std::chrono::milliseconds timeout_;
};

std::unique_ptr<P2P> open_mailbox(std::shared_ptr<Mailbox> mailbox, P2PPlace place,
                                  std::chrono::milliseconds timeout) {
  return std::make_unique<InProcessP2P>(std::move(mailbox), std::move(place), timeout);
}

}  // namespace tessera::comm
