#include "comm/backends/gloo/point_to_point.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "base/interrupt.h"
#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "comm/backends/entry_record.h"
#include "comm/backends/gloo/exchange.h"
#include "comm/backends/gloo/gloo_p2p.h"
#include "comm/batch.h"
#include "comm/ops/relay.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// The fingerprint of the exchange of records.
constexpr std::uint64_t kRecordFingerprint = 0x656e7472696573ULL;

/// A group that is being opened. On the wait board it is the wait for the group's first collective.
class Opening final : public Blocked {
 public:
  explicit Opening(const Channel& channel) : channel_(channel) {}

  void abort() override {}  // ChannelOptions::open looks at the abort flag by itself
  std::optional<PeerWait> waits_for() const override {
    const int peer = *peer_;
    if (peer < 0) return std::nullopt;
    const ChannelOptions& group = channel_.options;
    return PeerWait{channel_.log->group_hash(), 0, group.world_rank(peer),
                    concat("the opening of group ", group.name)};
  }
  /// May outlive the opening, in a thread that was abandoned.
  std::function<void(int peer)> listener() const {
    return [peer = peer_](int index) { *peer = index; };
  }

 private:
  const Channel& channel_;
  const std::shared_ptr<std::atomic<int>> peer_ = std::make_shared<std::atomic<int>>(-1);
};

// [Note: connections] Two ranks of a group for messages connect when they first send to each other:
// these messages are relayed (relay.h), so a rank exchanges messages with 2 log2 N other ranks and
// not with all. Each connection is a Gloo group of its two ranks. A thread opens it, for which no
// caller has to wait: the other rank may never come. The wait for it is a wait like any other, with
// a deadline, a name for the failure watch, and an end when the World is aborted. Connecting is
// collective: the other rank connects too, since both are about to run the same collective. A
// direct collective needs all connections: they are opened in waves, since each takes two threads
// meanwhile.
constexpr std::chrono::milliseconds kLookAgain{2};
constexpr int kMostAtOnce = 32;

using Backend = c10::intrusive_ptr<c10d::Backend>;

struct Attempt {
  int peer;
  std::future<Backend> opened;
};

/// Opens one connection on a thread, which keeps alive what it uses, and ends by itself if no
/// caller waits for it any more. That holds after a recovery, too, since what it reads is taken
/// before it starts.
Attempt attempt(int peer, const Channel& channel, int epoch) {
  std::packaged_task<Backend()> open(channel.options.open_pair(epoch, peer));
  auto opened = open.get_future();
  std::thread([open = std::move(open)]() mutable {
    const base::NoInterrupts of_the_library;
    open();
  }).detach();
  return {peer, std::move(opened)};
}

class Connecting final : public TransportWait {
 public:
  Connecting(std::shared_ptr<Channel> channel, const Entry& entry)
      : TransportWait(std::move(channel)), entry_(entry) {
    begin();
  }

  Backend finish(Attempt& one) {
    set_peer(one.peer);
    base::InterruptTimer timer;
    while (one.opened.wait_for(kLookAgain) != std::future_status::ready) {
      check_aborted();
      options().abort_flag->ask_interrupt(timer);
      if (is_over()) blame_cause(one.peer);
    }
    std::string failed;
    try {
      return one.opened.get();
    } catch (const std::exception& error) {
      failed = one_line(error.what());
    }
    if (is_over()) {
      check_aborted();
      blame_cause(one.peer);
    }
    blame(one.peer, concat("cannot connect to rank ", world_rank(one.peer), ": ", failed));
  }

 private:
  void abort() override {}  // finish() looks at the abort flag
  PeerWait standing(int rank) const override { return channel_->log->wait_for(entry_, rank); }
  std::string text() const override { return standing(-1).text; }

  const Entry& entry_;
};

/// Connects the channel to those of `peers` (indices) to which it is not connected, for an entry of
/// its log, within the channel's patience. Errors: LostRank naming the rank that did not come in
/// time.
void connect_to(const std::vector<int>& peers, const std::shared_ptr<Channel>& channel, int epoch,
                const Entry& entry) {
  std::vector<Attempt> attempts;
  for (const int peer : peers) {
    if (!channel->lines[static_cast<std::size_t>(peer)].backend) {
      attempts.push_back(attempt(peer, *channel, epoch));
    }
  }
  if (attempts.empty()) return;
  Connecting wait(channel, entry);
  const OnBoard on_board(*channel->options.board, wait);
  for (Attempt& one : attempts) {
    channel->lines[static_cast<std::size_t>(one.peer)] = {wait.finish(one),
                                                          one.peer < channel->options.self ? 0 : 1};
  }
}

/// The work of a collective that test_hooks::issues_instead has replaced.
class NotIssued final : public Work {
 public:
  void wait() override {}
};

}  // namespace

PointToPointGroup::PointToPointGroup(ChannelOptions options)
    : channel_(std::make_shared<Channel>(std::move(options))) {
  open();
}

PointToPointGroup::~PointToPointGroup() = default;

int PointToPointGroup::rank() const { return channel_->options.self; }
int PointToPointGroup::size() const { return channel_->size(); }
const std::string& PointToPointGroup::name() const { return channel_->options.name; }

std::unique_ptr<Work> PointToPointGroup::start(Batch batch) {
  const auto hook = test_hooks::issues_instead.get();
  if (!hook) [[likely]]
    return start_one(std::move(batch));
  auto instead = (*hook)(*this, batch);
  if (instead.empty()) return std::make_unique<NotIssued>();
  for (std::size_t i = 0; i + 1 < instead.size(); ++i) start_one(std::move(instead[i]))->wait();
  return start_one(std::move(instead.back()));
}

std::unique_ptr<Work> PointToPointGroup::start_one(Batch batch) {
  channel_->options.abort_flag->check();
  check_batch(batch, size());
  require_no_p2p(p2p_.get(), name());
  if (!open_) open();
  const auto entry = channel_->log->record(batch, next_sequence_++);
  connect(batch, *entry);
  if (channel_->options.compare_entries) compare(batch, entry);
  return start_exchange(channel_, std::move(batch), entry, entry->fingerprint);
}

P2P& PointToPointGroup::p2p() { return gloo_p2p(); }

GlooP2P& PointToPointGroup::gloo_p2p() {
  TESSERA_INVARIANT(!channel_->options.open_pair, "group ", name(),
                    ": found connections that are made for collectives, expected all of them");
  if (!p2p_) {
    p2p_ = std::make_unique<GlooP2P>(channel_, [this] {
      if (!open_) open();
    });
  }
  if (!open_) open();
  return *p2p_;
}

void PointToPointGroup::open() {
  Opening opening(*channel_);
  const OnBoard waiting(*channel_->options.board, opening);
  const auto all = channel_->options.open(epoch_, opening.listener());
  for (int peer = 0; peer < size() && all; ++peer) {
    channel_->lines[static_cast<std::size_t>(peer)] = {all, peer};
  }
  open_ = true;
}

void PointToPointGroup::reset(int epoch) {
  open_ = false;
  if (p2p_) p2p_->reset();
  for (Line& line : channel_->lines) line.backend.reset();
  channel_->log->clear();
  epoch_ = epoch;
  next_sequence_ = 0;
}

void PointToPointGroup::connect(const Batch& batch, const Entry& entry) {
  if (!channel_->options.open_pair) return;
  const bool relayed = !channel_->options.compare_entries &&
                       std::all_of(batch.ops.begin(), batch.ops.end(),
                                   [&](const Op& op) { return is_relayed(op, size()); });
  if (relayed) {
    connect_to(relay::partners(rank(), size()), channel_, epoch_, entry);
    return;
  }
  for (const auto& wave : relay::waves(rank(), size(), kMostAtOnce)) {
    // Each wave has its own deadline: a thousand ranks take longer than one late rank may.
    connect_to(wave, channel_, epoch_, entry);
  }
}

void PointToPointGroup::compare(const Batch& batch, const std::shared_ptr<const Entry>& entry) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(EntryRecord));
  auto buffer = at::zeros({size() * kBytes}, at::TensorOptions().dtype(at::kByte));
  auto* records = static_cast<EntryRecord*>(buffer.mutable_data_ptr());
  write_record(*entry, records[rank()]);

  Batch exchange;
  exchange.label = batch.label;
  exchange.ops.emplace_back(AllGather{buffer});
  start_exchange(channel_, std::move(exchange), entry, kRecordFingerprint)->wait();
  require_same_entries({records, static_cast<std::size_t>(size())}, rank(),
                       channel_->options.members, name());
}

}  // namespace tessera::comm
