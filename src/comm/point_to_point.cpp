#include "comm/point_to_point.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "comm/connections.h"
#include "comm/exchange.h"
#include "comm/relay.h"
#include "comm/sent_bytes.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// compare_entries: what each rank sends to the others before a collective.
constexpr std::int64_t kRecordBytes = 512;
constexpr std::uint64_t kRecordFingerprint = 0x656e7472696573ULL;

struct Record {
  std::uint64_t fingerprint;
  char text[static_cast<std::size_t>(kRecordBytes) - sizeof(std::uint64_t)];
};
static_assert(sizeof(Record) == kRecordBytes);

/// Stands on the board meanwhile: a rank that connects may still issue what others wait for.
class Opening final : public Blocked {
 public:
  void abort() override {}  // ChannelOptions::open looks at the poison by itself
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

std::unique_ptr<Work> PointToPointGroup::issue(Batch batch) {
  channel_->options.poison->check();
  check_batch(batch, size());
  if (!open_) {
    Opening opening;
    const OnBoard connecting(*channel_->options.board, opening);
    open();
  }
  const std::uint64_t sequence = next_sequence_++;
  const std::uint64_t fingerprint = channel_->log->record(batch, sequence);
  connect(batch, sequence);
  if (channel_->options.compare_entries) compare(batch, sequence);
  auto work = std::make_unique<Exchange>(channel_, std::move(batch), sequence, fingerprint);
  work->start();
  return work;
}

void PointToPointGroup::open() {
  const auto all = channel_->options.open(epoch_);
  for (int peer = 0; peer < size() && all; ++peer) {
    channel_->lines[static_cast<std::size_t>(peer)] = {all, peer};
  }
  open_ = true;
}

void PointToPointGroup::reset(int epoch) {
  open_ = false;
  for (Line& line : channel_->lines) line.backend.reset();
  channel_->log->clear();
  epoch_ = epoch;
  next_sequence_ = 0;
}

void PointToPointGroup::connect(const Batch& batch, std::uint64_t sequence) {
  if (!channel_->options.open_pair) return;
  const bool relayed = !channel_->options.compare_entries &&
                       std::all_of(batch.ops.begin(), batch.ops.end(),
                                   [&](const Op& op) { return is_relayed(op, size()); });
  std::vector<int> peers;
  if (relayed) {
    peers = relay::partners(rank(), size());
  } else {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) peers.push_back(peer);
    }
  }
  connect_to(peers, *channel_, epoch_, sequence);
}

void PointToPointGroup::compare(const Batch& batch, std::uint64_t sequence) {
  Entry entry;
  describe(batch, sequence, entry);
  auto buffer = at::zeros({size() * kRecordBytes}, at::TensorOptions().dtype(at::kByte));
  auto* records = static_cast<Record*>(buffer.mutable_data_ptr());
  Record& mine = records[rank()];
  mine.fingerprint = entry.fingerprint;
  to_string(entry).copy(mine.text, sizeof(mine.text) - 1);

  Batch exchange;
  exchange.label = batch.label;
  exchange.ops.emplace_back(AllGather{buffer});
  Exchange work(channel_, std::move(exchange), sequence, kRecordFingerprint);
  work.start();
  work.wait();
  const auto& members = channel_->options.members;
  for (int other = 0; other < size(); ++other) {
    if (records[other].fingerprint == mine.fingerprint) continue;
    records[other].text[sizeof(mine.text) - 1] = '\0';
    const int first = std::min(rank(), other);
    const int second = std::max(rank(), other);
    throw Error(
        ErrorKind::kComm,
        concat("ranks disagree: rank ", members[static_cast<std::size_t>(first)], " issues ",
               records[first].text, " but rank ", members[static_cast<std::size_t>(second)],
               " issues ", records[second].text, " (group ", name(), ")"));
  }
}

}  // namespace tessera::comm
