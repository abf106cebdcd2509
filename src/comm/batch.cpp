#include "comm/batch.h"

#include <algorithm>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

std::string describe(const OpFacts& op) {
  if (op.kind == Kind::kAllToAll) return c10::toString(op.wire);
  std::string text = concat(op.bytes, " B ", c10::toString(op.wire));
  if (op.result != op.wire) text += concat(" into ", c10::toString(op.result));
  return text;
}

class Done : public Work {
 public:
  void wait() override {}
};

}  // namespace

std::string to_string(const Entry& entry) {
  std::string text =
      concat(to_string(entry.label.kind), " of ", entry.label.unit, " (#", entry.sequence,
             ", unit ", entry.label.unit_id, ", micro-batch ", entry.label.micro_batch);
  if (entry.label.stage != UnitHere::kNoStage) text += concat(", stage ", entry.label.stage);
  if (entry.label.activations != ActivationPass::kNone) {
    text += concat(", ", to_string(entry.label.activations));
  }
  text += concat(entry.label.controls.empty() ? "" : ", ", entry.label.controls, ":");
  bool first = true;
  for (const OpFacts& op : entry.ops) {
    text += first ? " " : " + ";
    if (entry.label.kind != op.kind) text += concat(to_string(op.kind), " ");
    text += describe(op);
    first = false;
  }
  return text + ")";
}

void describe(const Batch& batch, std::uint64_t sequence, Entry& entry) {
  entry.label = batch.label;
  entry.sequence = sequence;
  entry.ops.clear();
  Hasher hash;
  hash.add(static_cast<std::uint64_t>(batch.label.kind)).add(std::string_view(batch.label.unit));
  hash.add(std::uint64_t{batch.label.unit_id}).add(std::uint64_t{batch.label.micro_batch});
  hash.add(static_cast<std::uint64_t>(batch.label.activations));
  hash.add(std::int64_t{batch.label.stage}).add(std::string_view(batch.label.controls));
  for (const Op& op : batch.ops) {
    const OpFacts& one = entry.ops.emplace_back(
        std::visit([](const auto& collective) { return collective.facts(); }, op));
    hash.add(static_cast<std::uint64_t>(one.kind)).add(one.bytes);
    hash.add(static_cast<std::uint64_t>(one.wire)).add(static_cast<std::uint64_t>(one.result));
    hash.add(one.relayed);
  }
  entry.fingerprint = hash.digest();
}

int transfer_tag(std::uint64_t fingerprint, std::uint64_t sequence, std::uint64_t op) {
  return static_cast<int>(Hasher().add(fingerprint).add(sequence).add(op).digest() & 0x7fffffffU);
}

void check_batch(const Batch& batch, int ranks, at::Device device) {
  const CheckedBatch of{batch.label.kind, batch.label.unit, ranks, device};
  for (const Op& op : batch.ops) std::visit([&](const auto& one) { one.check(of); }, op);
}

Batch cloned(const Batch& batch, const MakeTwin& make) {
  Batch copy{batch.label, {}};
  for (const Op& op : batch.ops) {
    copy.ops.push_back(std::visit([&](const auto& one) -> Op { return one.cloned(make); }, op));
  }
  return copy;
}

void deliver(const Batch& twins, const Batch& batch) {
  for (std::size_t i = 0; i < batch.ops.size(); ++i) {
    std::visit([&]<class One>(const One& to) { std::get<One>(twins.ops[i]).deliver(to); },
               batch.ops[i]);
  }
}

void run_alone(const Batch& batch) {
  for (const Op& op : batch.ops) std::visit([](const auto& one) { one.run_alone(); }, op);
}

std::unique_ptr<Work> SoloGroup::start(Batch batch) {
  if (abort_flag_) abort_flag_->check();
  if (batch.ops.empty()) return std::make_unique<Done>();
  const at::Tensor& any = first_tensor(batch.ops.front());
  check_batch(batch, 1, any.defined() ? any.device() : at::kCPU);
  run_alone(batch);
  return std::make_unique<Done>();
}

bool is_relayed(const Op& op, int ranks) {
  return std::visit([&](const auto& one) { return one.is_relayed(ranks); }, op);
}

std::int64_t sent_bytes(const Op& op, int ranks, int rank) {
  return std::visit([&](const auto& one) { return one.sent_bytes(ranks, rank); }, op);
}

std::int64_t sent_bytes(const Batch& batch, int ranks, int rank) {
  std::int64_t bytes = 0;
  for (const Op& op : batch.ops) bytes += sent_bytes(op, ranks, rank);
  return bytes;
}

IssueWords Entry::words() const {
  const bool again = label.activations == ActivationPass::kRecomputed;
  const std::string unit =
      again ? concat(label.unit, " ", to_string(label.activations)) : label.unit;
  return {std::string(to_string(label.kind)),
          label.within.empty() ? unit : concat(label.within, " (", unit, ")"), label.micro_batch};
}

FlightRecorder::FlightRecorder(std::string group, WaitBoard* board)
    : group_(std::move(group)),
      group_hash_(hash_bytes(group_)),
      purpose_(hash_bytes(purpose_in(group_))),
      board_(board) {}

std::uint64_t FlightRecorder::what_of(const Entry& entry) const {
  const Label& label = entry.label;
  const std::uint64_t what = comm::what_of(entry.fingerprint, purpose_);
  return label.within.empty() ? what : hash_bytes(label.within, what);
}

std::shared_ptr<const Entry> FlightRecorder::record(const Batch& batch, std::uint64_t sequence) {
  auto entry = std::make_shared<Entry>();
  describe(batch, sequence, *entry);
  if (board_ != nullptr) {
    entry->order = board_->order().note({group_hash_, what_of(*entry), sequence,
                                         std::chrono::steady_clock::now(), batch.label.pass},
                                        [&] { return entry; });
  }
  const base::Lock lock(mutex_);
  const std::uint64_t before = count_ == 0 ? 0 : ring_[(count_ - 1) % ring_.size()].hash_so_far;
  Kept& kept = ring_[count_++ % ring_.size()];
  kept.entry = entry;
  kept.hash_so_far = Hasher().add(before).add(entry->fingerprint).digest();
  return entry;
}

void FlightRecorder::clear() {
  const base::Lock lock(mutex_);
  count_ = 0;
}

std::string FlightRecorder::lines() const {
  const base::Lock lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  std::string text;
  for (std::uint64_t i = count_ - kept; i < count_; ++i) {
    const Entry& entry = *ring_[i % ring_.size()].entry;
    text +=
        concat(group_, "\t", entry.sequence, "\t", entry.fingerprint, "\t", to_string(entry), "\n");
  }
  return text;
}

IssuedHashes FlightRecorder::issued() const {
  const base::Lock lock(mutex_);
  IssuedHashes issued{group_hash_, count_, {}};
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  for (std::uint64_t back = 1; back <= kept; ++back) {
    issued.latest.push_back(ring_[(count_ - back) % ring_.size()].hash_so_far);
  }
  return issued;
}

std::optional<BoardLane> FlightRecorder::lane() const {
  const base::Lock lock(mutex_);
  return BoardLane{group_hash_, group_, count_};
}

PeerWait FlightRecorder::wait_for(const Entry& entry, int peer) const {
  return {group_hash_, entry.sequence, peer, concat(to_string(entry), " on group ", group_),
          what_of(entry)};
}

}  // namespace tessera::comm
