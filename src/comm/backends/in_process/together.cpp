#include "comm/backends/in_process/together.h"

#include <compare>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using OwnMemory = std::unique_ptr<std::byte[]>;

OwnMemory own_memory(std::int64_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
}

/// Names the message that travels between two ranks in a round.
struct Passage {
  int round;
  int from;
  int to;
  auto operator<=>(const Passage&) const = default;
};

struct SharedMessage {
  const void* from = nullptr;
  std::int64_t sent = 0;
  void* to = nullptr;  ///< null: the receiver reads the sender's memory
  std::int64_t expected = 0;
};

using SharedMessages = std::map<Passage, SharedMessage>;

class SharedRank final : public Transfers {
 public:
  SharedRank(SharedMessages& messages, const Op& op, int size, int self)
      : steps(std::visit([&](const auto& one) { return one.steps(size, self); }, op)),
        messages_(messages),
        size_(size),
        self_(self) {}

  int size() const override { return size_; }
  int self() const override { return self_; }
  void receive(int peer, void* to, std::int64_t bytes, int round) override {
    if (bytes == 0) return;
    SharedMessage& message = messages_[{round, peer, self_}];
    message.to = to;
    message.expected = bytes;
  }
  void send(int peer, const void* from, std::int64_t bytes, int round) override {
    if (bytes == 0) return;
    SharedMessage& message = messages_[{round, self_, peer}];
    message.from = from;
    message.sent = bytes;
  }
  void receive_addends(std::int64_t bytes) override {
    for_others(*this, [&](int peer) { receive(peer, nullptr, bytes, 0); });
  }
  const void* addend(int peer) override { return messages_[{0, peer, self_}].from; }
  void take_aside(std::int64_t bytes) override { aside_ = own_memory(bytes); }
  std::byte* aside(std::int64_t offset) override { return aside_.get() + offset; }
  /// Keeps a copy of memory that later ranks have not read yet.
  void before_overwriting(const void* memory, std::int64_t bytes) override {
    const auto* begin = static_cast<const std::byte*>(memory);
    std::byte* copy = nullptr;  // one for all of them
    for (int peer = self_ + 1; peer < size_; ++peer) {
      const auto found = messages_.find({0, self_, peer});
      if (found == messages_.end() || found->second.to != nullptr) continue;
      SharedMessage& message = found->second;
      const auto* from = static_cast<const std::byte*>(message.from);
      if (begin >= from + message.sent || from >= begin + bytes) continue;
      TESSERA_INVARIANT(begin <= from && from + message.sent <= begin + bytes,
                        "a sum in place: found it over a part of what index ", peer,
                        " has yet to read, expected all of that or nothing");
      if (copy == nullptr) {
        copy = kept_.emplace_back(own_memory(bytes)).get();
        std::memcpy(copy, begin, static_cast<std::size_t>(bytes));
      }
      message.from = copy + (from - begin);
    }
  }

  const std::unique_ptr<Steps> steps;

 private:
  SharedMessages& messages_;
  const int size_;
  const int self_;
  OwnMemory aside_;
  std::vector<OwnMemory> kept_;  ///< copies of what was overwritten
};

/// Runs one op of all ranks. The constructor posts the first round.
class Together {
 public:
  Together(const std::vector<Batch>& batches, std::size_t index) {
    const auto size = static_cast<int>(batches.size());
    for (int rank = 0; rank < size; ++rank) {
      ranks_.emplace_back(messages_, batches[static_cast<std::size_t>(rank)].ops[index], size,
                          rank);
    }
    post(0);
  }

  std::optional<ByteDifference> difference(int round) const {
    for (const auto& [passage, message] : messages_) {
      if (passage.round != round || message.sent == message.expected) continue;
      return ByteDifference{passage.from, passage.to, message.sent, message.expected};
    }
    return std::nullopt;
  }

  std::optional<ByteDifference> run() {
    const int rounds = ranks_.front().steps->rounds(static_cast<int>(ranks_.size()));
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) post(round);
      if (const auto found = difference(round)) return found;
      for (const auto& [passage, message] : messages_) {
        if (passage.round != round || message.to == nullptr) continue;
        std::memcpy(message.to, message.from, static_cast<std::size_t>(message.sent));
      }
      for (SharedRank& rank : ranks_) rank.steps->combine(rank, round);
    }
    return std::nullopt;
  }

 private:
  void post(int round) {
    for (SharedRank& rank : ranks_) rank.steps->post_receives(rank, round);
    for (SharedRank& rank : ranks_) rank.steps->post_sends(rank, round);
  }

  SharedMessages messages_;
  std::deque<SharedRank> ranks_;
};

}  // namespace

std::optional<ByteDifference> run_together(const std::vector<Batch>& batches, std::size_t index) {
  return Together(batches, index).run();
}

std::optional<ByteDifference> difference_between(const std::vector<Batch>& batches,
                                                 std::size_t index) {
  return Together(batches, index).difference(0);
}

}  // namespace tessera::comm
