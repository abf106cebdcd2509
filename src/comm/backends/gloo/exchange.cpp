#include "comm/backends/gloo/exchange.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

class Exchange final : public Work, private TransportWait {
 public:
  Exchange(std::shared_ptr<Channel> channel, Batch batch, std::shared_ptr<const Entry> of,
           std::uint64_t fingerprint);
  ~Exchange() override;

  void start();
  void wait() override;

 private:
  struct Transfer {
    Channel::Posted posted;
    int peer;
    int round;
    const std::byte* memory;
    std::int64_t bytes;
    bool finished = false;
  };
  /// The transfers of one op.
  class UnderWay final : public Transfers {
   public:
    UnderWay(Exchange& exchange, std::size_t index);

    int size() const override { return exchange_.channel_->size(); }
    int self() const override { return exchange_.options().self; }
    void receive(int peer, void* to, std::int64_t bytes, int round) override;
    void send(int peer, const void* from, std::int64_t bytes, int round) override;
    void receive_addends(std::int64_t bytes) override;
    const void* addend(int peer) override { return place_of(peer); }
    void take_aside(std::int64_t bytes) override {
      aside_ = exchange_.channel_->take_buffer(bytes);
    }
    std::byte* aside(std::int64_t offset) override { return at_byte(aside_, offset); }
    void before_overwriting(const void* memory, std::int64_t bytes) override {
      const auto* begin = static_cast<const std::byte*>(memory);
      for (Transfer& sent : sends) {
        if (begin < sent.memory + sent.bytes && sent.memory < begin + bytes) exchange_.finish(sent);
      }
    }

    int rounds() const { return steps->rounds(size()); }
    void post(int round);  ///< posts any round but the first
    void finish_round(int round);
    void recycle();

    const std::unique_ptr<Steps> steps;
    std::vector<Transfer> receives;
    std::vector<Transfer> sends;

   private:
    Transfer posted(Channel::End end, int peer, const void* memory, std::int64_t bytes,
                    int round) const;
    std::byte* place_of(int peer) {
      return aside(addend_bytes_ * (peer < self() ? peer : peer - 1));
    }

    Exchange& exchange_;
    const std::size_t index_;
    at::Tensor aside_;
    std::int64_t addend_bytes_ = 0;
    void* own_ = nullptr;  // where this rank receives from itself
    std::int64_t own_bytes_ = 0;
  };

  void abort() override;
  PeerWait standing(int rank) const override { return channel_->log->wait_for(*of_, rank); }
  std::string text() const override;
  [[noreturn]] void time_is_up(int peer) override;

  void finish(Transfer& transfer);
  /// Whether this rank may wait for one that itself waits for another rank.
  bool is_relayed() const;
  /// Returns the world ranks whose transfers have not arrived after a timeout.
  std::vector<int> not_arrived();
  /// Checks that the bytes sent are those of sent_bytes(): nothing else counts them.
  void check_posted() const;

  Batch batch_;
  const std::shared_ptr<const Entry> of_;
  const std::uint64_t fingerprint_;
  std::deque<UnderWay> under_way_;
  std::int64_t posted_bytes_ = 0;
  base::Mutex mutex_;  // guards under_way_'s lists between wait() and abort()
  bool done_ = false;
  std::exception_ptr failure_;
};

Exchange::UnderWay::UnderWay(Exchange& exchange, std::size_t index)
    : steps(std::visit(
          [&](const auto& op) {
            return op.steps(exchange.channel_->size(), exchange.options().self);
          },
          exchange.batch_.ops[index])),
      exchange_(exchange),
      index_(index) {}

Exchange::Transfer Exchange::UnderWay::posted(Channel::End end, int peer, const void* memory,
                                              std::int64_t bytes, int round) const {
  const std::size_t place = index_ + exchange_.batch_.ops.size() * static_cast<std::size_t>(round);
  const int tag = transfer_tag(exchange_.fingerprint_, exchange_.of_->sequence, place);
  // c10d takes tensors; the exchange keeps the owner of this memory.
  const at::Tensor elements =
      at::from_blob(const_cast<void*>(memory), {bytes}, at::TensorOptions().dtype(at::kByte));
  return {exchange_.channel_->post(end, peer, elements, tag), peer, round,
          static_cast<const std::byte*>(memory), bytes};
}

void Exchange::UnderWay::receive(int peer, void* to, std::int64_t bytes, int round) {
  if (peer == self()) {
    own_ = to;
    own_bytes_ = bytes;
  } else if (bytes > 0) {
    receives.push_back(posted(Channel::End::kReceive, peer, to, bytes, round));
  }
}

void Exchange::UnderWay::send(int peer, const void* from, std::int64_t bytes, int round) {
  if (peer == self()) {
    TESSERA_INVARIANT(bytes == own_bytes_, exchange_.text(), ": found ", bytes,
                      " B from this rank to itself, expected ", own_bytes_);
    if (bytes > 0) std::memcpy(own_, from, static_cast<std::size_t>(bytes));
  } else if (bytes > 0) {
    sends.push_back(posted(Channel::End::kSend, peer, from, bytes, round));
    exchange_.posted_bytes_ += bytes;
  }
}

void Exchange::UnderWay::receive_addends(std::int64_t bytes) {
  take_aside(bytes * (size() - 1));
  addend_bytes_ = bytes;
  for_others(*this, [&](int peer) { receive(peer, place_of(peer), bytes, 0); });
}

void Exchange::UnderWay::post(int round) {
  exchange_.posting([&] {
    const base::Lock lock(exchange_.mutex_);
    exchange_.check_aborted();
    for (auto* transfers : {&receives, &sends}) {
      std::erase_if(*transfers, [](const Transfer& one) { return one.finished; });
    }
    steps->post_receives(*this, round);
    steps->post_sends(*this, round);
  });
}

void Exchange::UnderWay::finish_round(int round) {
  for (Transfer& transfer : receives) {
    if (transfer.round == round) exchange_.finish(transfer);
  }
  steps->combine(*this, round);
}

void Exchange::UnderWay::recycle() {
  if (aside_.defined()) exchange_.channel_->recycle(std::exchange(aside_, {}));
}

Exchange::Exchange(std::shared_ptr<Channel> channel, Batch batch, std::shared_ptr<const Entry> of,
                   std::uint64_t fingerprint)
    : TransportWait(std::move(channel)),
      batch_(std::move(batch)),
      of_(std::move(of)),
      fingerprint_(fingerprint) {
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) under_way_.emplace_back(*this, i);
}

Exchange::~Exchange() {
  // Gloo releases a buffer when its work object is destroyed; only then may the memory be used
  // again.
  for (UnderWay& op : under_way_) {
    op.receives.clear();
    op.sends.clear();
    op.recycle();
  }
}

std::string Exchange::text() const {
  Entry entry;
  describe(batch_, of_->sequence, entry);
  return concat(to_string(entry), " on group ", options().name);
}

void Exchange::start() {
  // A transfer whose receive is posted already needs no round trip, so receives are posted first.
  posting([&] {
    for (UnderWay& op : under_way_) op.steps->post_receives(op, 0);
    for (UnderWay& op : under_way_) op.steps->post_sends(op, 0);
  });
}

void Exchange::abort() {
  const base::Lock lock(mutex_);
  for (UnderWay& op : under_way_) {
    for (Transfer& transfer : op.receives) transfer.posted->abort();
    for (Transfer& transfer : op.sends) transfer.posted->abort();
  }
}

void Exchange::wait() {
  if (done_) return;
  if (failure_) std::rethrow_exception(failure_);
  const OnBoard on_board(*options().board, *this);
  begin();
  try {
    check_aborted();  // a later abort finds this wait on the board
    bool more = true;
    for (int round = 0; std::exchange(more, false); ++round) {
      for (UnderWay& op : under_way_) {
        if (round >= op.rounds()) continue;
        op.finish_round(round);
        if (round + 1 == op.rounds()) continue;
        op.post(round + 1);
        more = true;
      }
    }
    for (UnderWay& op : under_way_) {
      for (Transfer& sent : op.sends) finish(sent);
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  check_posted();
  for (UnderWay& op : under_way_) op.recycle();
  batch_.ops.clear();
  options().board->order().done(of_->order);
  done_ = true;
}

void Exchange::check_posted() const {
  const std::int64_t expected = sent_bytes(batch_, channel_->size(), options().self);
  TESSERA_INVARIANT(posted_bytes_ == expected, text(), ": sent ", posted_bytes_, " B, expected ",
                    expected);
}

void Exchange::finish(Transfer& transfer) {
  if (transfer.finished) return;
  wait_for(*transfer.posted, transfer.peer);
  transfer.finished = true;
}

std::vector<int> Exchange::not_arrived() {
  std::vector<int> ranks;
  for (UnderWay& op : under_way_) {
    for (auto* transfers : {&op.receives, &op.sends}) {
      for (Transfer& transfer : *transfers) {
        if (transfer.finished) continue;
        try {
          // Gloo has closed the connections after the timeout, so a wait for a missing transfer
          // throws at once. A wait that was woken before returns false once.
          transfer.finished = transfer.posted->wait(std::chrono::milliseconds(1)) ||
                              transfer.posted->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {
          ranks.push_back(world_rank(transfer.peer));
        }
      }
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

bool Exchange::is_relayed() const {
  return std::any_of(batch_.ops.begin(), batch_.ops.end(),
                     [&](const Op& op) { return comm::is_relayed(op, channel_->size()); });
}

void Exchange::time_is_up(int peer) {
  const AbortFlag& abort_flag = *options().abort_flag;
  if (!is_relayed()) {
    throw LostRank(waited_in_vain(text(), patience_, not_arrived(), abort_flag.patience));
  }
  // The rank that relays a message may itself wait for another rank. If it began later than this
  // rank, its time is up later: by then it has said so, or the watch has seen it wait. Meanwhile
  // this wait stays on the board, as in TransportWait::blame().
  hear_others(abort_flag, *options().board, world_rank(peer));
  blame_cause(peer);
}

}  // namespace

std::unique_ptr<Work> start_exchange(std::shared_ptr<Channel> channel, Batch batch,
                                     std::shared_ptr<const Entry> of, std::uint64_t fingerprint) {
  auto exchange =
      std::make_unique<Exchange>(std::move(channel), std::move(batch), std::move(of), fingerprint);
  exchange->start();
  return exchange;
}

}  // namespace tessera::comm
