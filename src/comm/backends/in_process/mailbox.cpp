#include "comm/backends/in_process/mailbox.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/test_hooks.h"
#include "tessera/error.h"

namespace tessera::comm {

/// Guarded by the mailbox's mutex.
struct Mailbox::Message {
  Message(const Key& what, std::uint64_t when) : key(what), generation(when) {}

  const Key key;
  const std::uint64_t generation;
  std::optional<Letter> sent;
  std::optional<Letter> received;
  bool buffered = false;
  bool matched = false;
  bool delivered = false;
  std::chrono::steady_clock::time_point arrives;
  std::string failure;
};

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

std::shared_ptr<Mailbox::Message> Mailbox::post(const Key& key, const Letter& letter) {
  const auto buffers = test_hooks::buffered_messages.get();
  const base::Lock lock(mutex_);
  auto& half = half_posted_[key];
  if (!half) half = std::make_shared<Message>(key, generation_);
  const auto message = half;
  auto& end = letter.sends() ? message->sent : message->received;
  TESSERA_INVARIANT(!end, to_string(letter), ": found it posted already, expected a new tag");
  end = letter;
  if (letter.sends() && buffers && (*buffers)()) {
    message->buffered = true;
    end->tensor = letter.tensor.clone();
  }
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
  const at::Tensor& from = message.sent->tensor;
  const at::Tensor& to = message.received->tensor;
  if (from.sizes() != to.sizes() || from.scalar_type() != to.scalar_type()) {
    const bool sender_first = key.sender < key.receiver;
    message.failure =
        concat("ranks disagree: rank ", std::min(key.sender, key.receiver), " issues ",
               to_string(sender_first ? *message.sent : *message.received), " but rank ",
               std::max(key.sender, key.receiver), " issues ",
               to_string(sender_first ? *message.received : *message.sent));
  }
  changed_.notify_all();
}

bool Mailbox::is_through(Message& message, const Letter& letter) {
  if (message.delivered) return true;
  if (message.generation != generation_) throw lost_in_recovery(letter);
  if (!message.failure.empty()) throw Error(ErrorKind::kComm, message.failure);
  if (letter.sends() && message.buffered) return true;
  if (!message.matched || std::chrono::steady_clock::now() < message.arrives) return false;
  const at::Tensor& from = message.sent->tensor;
  if (from.nbytes() > 0) {
    std::memcpy(message.received->tensor.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  }
  message.delivered = true;
  // Each end may hold the message for long: not the other's memory with it.
  message.sent->tensor.reset();
  message.received->tensor.reset();
  changed_.notify_all();
  return true;
}

std::string Mailbox::others_than(const Message& message, const Letter& letter) const {
  constexpr int kNamed = 4;
  std::string text;
  int named = 0;
  for (const auto& [key, half] : half_posted_) {
    const auto& other = letter.sends() ? half->received : half->sent;
    const bool same_way = key.sender == message.key.sender && key.receiver == message.key.receiver;
    if (!same_way || !other || ++named > kNamed) continue;
    text += concat(text.empty() ? "; it has posted " : " and ", to_string(*other));
  }
  return named > kNamed ? concat(text, " and ", named - kNamed, " more") : text;
}

void Mailbox::wait_for(Message& message, const Letter& letter, std::chrono::milliseconds timeout,
                       const AbortFlag& abort_flag) {
  using Clock = std::chrono::steady_clock;
  const auto patience = abort_flag.patience.of(timeout);
  const auto deadline = Clock::now() + patience;
  base::Lock lock(mutex_);
  while (!is_through(message, letter)) {
    if (abort_flag.is_set()) throw LostRank(concat(to_string(letter), ": ", abort_flag.why()));
    const auto now = Clock::now();
    const bool on_its_way = message.matched;
    if (!on_its_way && now >= deadline) {
      throw LostRank(concat(waited_in_vain(letter, patience, letter.peer_rank, abort_flag.patience),
                            others_than(message, letter)));
    }
    changed_.wait_for(lock, (on_its_way ? message.arrives : deadline) - now,
                      [&]() TESSERA_REQUIRES(mutex_) {
                        return abort_flag.is_set() || message.delivered ||
                               message.matched != on_its_way || message.generation != generation_;
                      });
  }
}

bool Mailbox::poll(Message& message, const Letter& letter, const AbortFlag& abort_flag) {
  const base::Lock lock(mutex_);
  if (is_through(message, letter)) return true;
  if (abort_flag.is_set()) throw LostRank(concat(to_string(letter), ": ", abort_flag.why()));
  return false;
}

class InProcessTransfer final : public Transfer {
 public:
  InProcessTransfer(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Mailbox::Message> message,
                    Letter letter, std::chrono::milliseconds timeout,
                    std::shared_ptr<AbortFlag> abort_flag)
      : Transfer(abort_flag),
        mailbox_(std::move(mailbox)),
        message_(std::move(message)),
        letter_(std::move(letter)),
        timeout_(timeout),
        abort_flag_(std::move(abort_flag)) {}

 private:
  void finish() override { mailbox_->wait_for(*message_, letter_, timeout_, *abort_flag_); }
  bool poll() override { return mailbox_->poll(*message_, letter_, *abort_flag_); }

  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<Mailbox::Message> message_;
  const Letter letter_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<AbortFlag> abort_flag_;
};

class InProcessMail final : public Mail {
 public:
  InProcessMail(std::shared_ptr<Mailbox> mailbox, std::vector<int> members, int self,
                std::chrono::milliseconds timeout, std::shared_ptr<AbortFlag> abort_flag)
      : Mail(std::move(members), self),
        mailbox_(std::move(mailbox)),
        timeout_(timeout),
        abort_flag_(std::move(abort_flag)) {}

 private:
  std::unique_ptr<Transfer> post(Letter letter) override {
    if (abort_flag_->is_set()) throw LostRank(concat(to_string(letter), ": ", abort_flag_->why()));
    const int self = members()[static_cast<std::size_t>(rank())];
    const Mailbox::Key key{letter.sends() ? self : letter.peer_rank,
                           letter.sends() ? letter.peer_rank : self, letter.tag};
    auto message = mailbox_->post(key, letter);
    return std::make_unique<InProcessTransfer>(mailbox_, std::move(message), std::move(letter),
                                               timeout_, abort_flag_);
  }

  const std::shared_ptr<Mailbox> mailbox_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<AbortFlag> abort_flag_;
};

std::unique_ptr<Mail> open_mailbox(std::shared_ptr<Mailbox> mailbox, std::vector<int> members,
                                   int self, std::chrono::milliseconds timeout,
                                   std::shared_ptr<AbortFlag> abort_flag) {
  return std::make_unique<InProcessMail>(std::move(mailbox), std::move(members), self, timeout,
                                         std::move(abort_flag));
}

}  // namespace tessera::comm
