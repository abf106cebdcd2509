#include "comm/in_process.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/joined.h"
#include "comm/batch.h"
#include "comm/sum.h"
#include "comm/tensor_bytes.h"
#include "tessera/error.h"

namespace tessera::comm {

/// One collective: a batch a member, then the outcome.
struct Hub::Meeting {
  std::uint64_t sequence = 0;
  std::vector<Batch> batches;
  std::vector<bool> came;
  int count = 0;
  bool done = false;
  std::string failure;
  std::vector<Batch> staged;  // Bend::deliver_at_wait: where the results are until each rank waits
};

/// What the members of one group share.
struct Hub::Room {
  std::string name;
  std::vector<int> members;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, std::shared_ptr<Meeting>> open;
  std::uint64_t generation = 0;
};

namespace {

void run_all_gather(const std::vector<Batch>& batches, std::size_t op) {
  const std::size_t ranks = batches.size();
  for (std::size_t from = 0; from < ranks; ++from) {
    const auto& source = std::get<AllGather>(batches[from].ops[op]).buffer;
    const std::size_t slice = source.nbytes() / ranks;
    if (slice == 0) return;
    for (std::size_t to = 0; to < ranks; ++to) {
      if (to == from) continue;
      const auto& target = std::get<AllGather>(batches[to].ops[op]).buffer;
      std::memcpy(at_byte(target, 0) + from * slice, at_byte(source, 0) + from * slice, slice);
    }
  }
}

void run_reduce_scatter(const std::vector<Batch>& batches, std::size_t op) {
  for (std::size_t to = 0; to < batches.size(); ++to) {
    const auto& target = std::get<ReduceScatter>(batches[to].ops[op]);
    const std::size_t slice = target.input.nbytes() / batches.size();
    std::vector<const void*> addends;
    for (const Batch& batch : batches) {
      addends.push_back(at_byte(std::get<ReduceScatter>(batch.ops[op]).input, 0) + to * slice);
    }
    sum_in_rank_order(addends, target.input.scalar_type(),
                      {target.output.mutable_data_ptr(), target.output.scalar_type(),
                       target.output.numel(), target.into});
  }
}

void run_all_reduce(const std::vector<Batch>& batches, std::size_t op) {
  std::vector<const void*> addends;
  for (const Batch& batch : batches) {
    addends.push_back(std::get<AllReduce>(batch.ops[op]).data.const_data_ptr());
  }
  const auto wire = std::get<AllReduce>(batches.front().ops[op]).data.scalar_type();
  const auto& first = std::get<AllReduce>(batches.front().ops[op]).result();
  sum_in_rank_order(
      addends, wire,
      {first.mutable_data_ptr(), first.scalar_type(), first.numel(), Into::kOverwrite});
  if (first.nbytes() == 0) return;
  for (std::size_t to = 1; to < batches.size(); ++to) {
    const auto& target = std::get<AllReduce>(batches[to].ops[op]).result();
    std::memcpy(at_byte(target, 0), at_byte(first, 0), first.nbytes());
  }
}

void run_all_to_all(const std::vector<Batch>& batches, std::size_t op) {
  std::vector<std::size_t> taken(batches.size(), 0);  // of each sender's input
  for (std::size_t to = 0; to < batches.size(); ++to) {
    const auto& target = std::get<AllToAll>(batches[to].ops[op]);
    std::size_t filled = 0;
    for (std::size_t from = 0; from < batches.size(); ++from) {
      const auto& source = std::get<AllToAll>(batches[from].ops[op]);
      const auto bytes = static_cast<std::size_t>(source.sends[to]) *
                         static_cast<std::size_t>(source.input.element_size());
      if (bytes > 0) {
        std::memcpy(at_byte(target.output, 0) + filled, at_byte(source.input, 0) + taken[from],
                    bytes);
      }
      filled += bytes;
      taken[from] += bytes;
    }
  }
}

void run_relayed_gather(const std::vector<Batch>& batches, std::size_t op) {
  std::int64_t begin = 0;
  for (std::size_t from = 0; from < batches.size(); ++from) {
    const auto& source = std::get<RelayedGather>(batches[from].ops[op]);
    const std::int64_t length = source.lengths[from];
    for (const Batch& to : batches) {
      const auto& target = std::get<RelayedGather>(to.ops[op]).bytes;
      if (&to == &batches[from] || length == 0) continue;
      std::memcpy(at_byte(target, 0) + begin, at_byte(source.bytes, 0) + begin,
                  static_cast<std::size_t>(length));
    }
    begin += length;
  }
}

void run_combine(const std::vector<Batch>& batches, std::size_t op) {
  const auto& [all, way] = std::get<Combine>(batches.front().ops[op]);
  for (std::size_t i = 1; i < batches.size(); ++i) {
    const auto& other = std::get<Combine>(batches[i].ops[op]).values;
    way == Combine::Way::kSum ? all.add_(other) : all.bitwise_or_(other);
  }
  for (const Batch& batch : batches) std::get<Combine>(batch.ops[op]).values.copy_(all);
}

void run(const std::vector<Batch>& batches) {
  for (std::size_t op = 0; op < batches.front().ops.size(); ++op) {
    if (std::holds_alternative<AllGather>(batches.front().ops[op])) {
      run_all_gather(batches, op);
    } else if (std::holds_alternative<ReduceScatter>(batches.front().ops[op])) {
      run_reduce_scatter(batches, op);
    } else if (std::holds_alternative<AllToAll>(batches.front().ops[op])) {
      run_all_to_all(batches, op);
    } else if (std::holds_alternative<RelayedGather>(batches.front().ops[op])) {
      run_relayed_gather(batches, op);
    } else if (std::holds_alternative<Combine>(batches.front().ops[op])) {
      run_combine(batches, op);
    } else {
      run_all_reduce(batches, op);
    }
  }
}

/// The first pair of ranks of which one sends what the other does not expect.
std::string count_disagreement(const Hub::Room& room, const Hub::Meeting& meeting) {
  const auto& batches = meeting.batches;
  for (std::size_t op = 0; op < batches.front().ops.size(); ++op) {
    if (!std::holds_alternative<AllToAll>(batches.front().ops[op])) continue;
    for (std::size_t from = 0; from < batches.size(); ++from) {
      for (std::size_t to = 0; to < batches.size(); ++to) {
        const auto sent = std::get<AllToAll>(batches[from].ops[op]).sends[to];
        const auto expected = std::get<AllToAll>(batches[to].ops[op]).receives[from];
        if (sent == expected) continue;
        return concat("ranks disagree: all_to_all of ", batches.front().label.unit, ": rank ",
                      room.members[from], " sends ", sent, " elements but rank ", room.members[to],
                      " expects ", expected, " (group ", room.name, ")");
      }
    }
  }
  return {};
}

/// Empty when all members mean the same collective.
std::string disagreement(const Hub::Room& room, const Hub::Meeting& meeting) {
  Entry first;
  describe(meeting.batches.front(), meeting.sequence, first);
  for (std::size_t other = 1; other < meeting.batches.size(); ++other) {
    Entry entry;
    describe(meeting.batches[other], meeting.sequence, entry);
    if (entry.fingerprint == first.fingerprint) continue;
    return concat("ranks disagree: rank ", room.members.front(), " issues ", to_string(first),
                  " but rank ", room.members[other], " issues ", to_string(entry), " (group ",
                  room.name, ")");
  }
  return count_disagreement(room, meeting);
}

Batch cloned(const Batch& batch) {
  Batch copy = batch;
  for (Op& op : copy.ops) {
    if (auto* gather = std::get_if<AllGather>(&op)) {
      gather->buffer = gather->buffer.clone();
    } else if (auto* reduce = std::get_if<ReduceScatter>(&op)) {
      reduce->input = reduce->input.clone();
      reduce->output = reduce->output.clone();
    } else if (auto* exchange = std::get_if<AllToAll>(&op)) {
      exchange->input = exchange->input.clone();
      exchange->output = exchange->output.clone();
    } else if (auto* relayed = std::get_if<RelayedGather>(&op)) {
      relayed->bytes = relayed->bytes.clone();
    } else if (auto* combine = std::get_if<Combine>(&op)) {
      combine->values = combine->values.clone();
    } else {
      auto& all = std::get<AllReduce>(op);
      all.data = all.data.clone();
      if (all.output.defined()) all.output = all.output.clone();
    }
  }
  return copy;
}

void deliver(const Batch& staged, const Batch& batch) {
  for (std::size_t i = 0; i < batch.ops.size(); ++i) {
    if (const auto* gather = std::get_if<AllGather>(&batch.ops[i])) {
      gather->buffer.copy_(std::get<AllGather>(staged.ops[i]).buffer);
    } else if (const auto* reduce = std::get_if<ReduceScatter>(&batch.ops[i])) {
      reduce->output.copy_(std::get<ReduceScatter>(staged.ops[i]).output);
    } else if (const auto* exchange = std::get_if<AllToAll>(&batch.ops[i])) {
      exchange->output.copy_(std::get<AllToAll>(staged.ops[i]).output);
    } else if (const auto* relayed = std::get_if<RelayedGather>(&batch.ops[i])) {
      relayed->bytes.copy_(std::get<RelayedGather>(staged.ops[i]).bytes);
    } else if (const auto* combine = std::get_if<Combine>(&batch.ops[i])) {
      combine->values.copy_(std::get<Combine>(staged.ops[i]).values);
    } else {
      std::get<AllReduce>(batch.ops[i]).result().copy_(std::get<AllReduce>(staged.ops[i]).result());
    }
  }
}

}  // namespace

class HubWork : public Work {
 public:
  HubWork(std::shared_ptr<Hub::Room> room, std::shared_ptr<Hub::Meeting> meeting, int self,
          std::chrono::milliseconds timeout, std::shared_ptr<Poison> poison)
      : room_(std::move(room)),
        meeting_(std::move(meeting)),
        self_(static_cast<std::size_t>(self)),
        timeout_(timeout),
        poison_(std::move(poison)) {}

  void wait() override {
    if (done_) return;
    const std::chrono::milliseconds patience = poison_->patience.of(timeout_);
    std::unique_lock lock(room_->mutex);
    const bool in_time = room_->changed.wait_for(
        lock, patience, [&] { return meeting_->done || poison_->is_set(); });
    if (meeting_->done && !meeting_->failure.empty()) {
      throw Error(ErrorKind::kComm, meeting_->failure);
    }
    if (!meeting_->done) {
      poison_->check();
      if (!in_time) throw PeerLost(missing(patience));
    }
    if (!meeting_->staged.empty()) deliver(meeting_->staged[self_], meeting_->batches[self_]);
    done_ = true;
  }

 private:
  std::string missing(std::chrono::milliseconds patience) const {
    Entry entry;
    describe(meeting_->batches[self_], meeting_->sequence, entry);
    std::vector<int> ranks;
    for (std::size_t i = 0; i < meeting_->came.size(); ++i) {
      if (!meeting_->came[i]) ranks.push_back(room_->members[i]);
    }
    return concat(to_string(entry), " on group ", room_->name, ": waited ", in_seconds(patience),
                  " for rank ", joined(ranks), poison_->patience.why_missing(ranks));
  }

  std::shared_ptr<Hub::Room> room_;
  std::shared_ptr<Hub::Meeting> meeting_;
  std::size_t self_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Poison> poison_;
  bool done_ = false;
};

class HubGroup : public Group {
 public:
  HubGroup(Hub& hub, std::shared_ptr<Hub::Room> room, int self, std::shared_ptr<Poison> poison)
      : hub_(hub), room_(std::move(room)), self_(self), poison_(std::move(poison)) {}

  int rank() const override { return self_; }
  int size() const override { return static_cast<int>(room_->members.size()); }
  const std::string& name() const override { return room_->name; }

  std::unique_ptr<Work> issue(Batch batch) override {
    poison_->check();
    check_batch(batch, size());
    std::shared_ptr<const Hub::Bend> bend;
    {
      const std::lock_guard lock(hub_.mutex_);
      bend = hub_.bend_;
    }
    const auto self = static_cast<std::size_t>(self_);
    if (bend->before_issue) bend->before_issue(room_->members[self], batch);
    const Joined joined = join(std::move(batch));
    if (joined.last) complete(*joined.meeting, bend->deliver_at_wait);
    return std::make_unique<HubWork>(room_, joined.meeting, self_, hub_.timeout_, poison_);
  }

 private:
  struct Joined {
    std::shared_ptr<Hub::Meeting> meeting;
    bool last;
  };

  Joined join(Batch batch) {
    const std::lock_guard lock(room_->mutex);
    if (generation_ != room_->generation) {
      generation_ = room_->generation;
      next_sequence_ = 0;
    }
    const std::uint64_t sequence = next_sequence_++;
    auto& meeting = room_->open[sequence];
    if (!meeting) {
      meeting = std::make_shared<Hub::Meeting>();
      meeting->sequence = sequence;
      meeting->batches.resize(room_->members.size());
      meeting->came.resize(room_->members.size());
    }
    const auto self = static_cast<std::size_t>(self_);
    meeting->batches[self] = std::move(batch);
    meeting->came[self] = true;
    Joined joined{meeting, ++meeting->count == size()};
    if (joined.last) room_->open.erase(sequence);
    return joined;
  }

  /// By the last member, for all of them.
  void complete(Hub::Meeting& meeting, bool deliver_at_wait) {
    std::string failure = disagreement(*room_, meeting);
    if (failure.empty()) {
      if (deliver_at_wait) {
        for (const Batch& batch : meeting.batches) meeting.staged.push_back(cloned(batch));
      }
      run(deliver_at_wait ? meeting.staged : meeting.batches);
    }
    const std::lock_guard lock(room_->mutex);
    meeting.failure = std::move(failure);
    meeting.done = true;
    room_->changed.notify_all();
  }

  Hub& hub_;
  std::shared_ptr<Hub::Room> room_;
  int self_;
  std::shared_ptr<Poison> poison_;
  std::uint64_t generation_ = 0;
  std::uint64_t next_sequence_ = 0;
};

std::shared_ptr<Hub::Room> Hub::room(const std::string& name, const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  auto& room = rooms_[name];
  if (!room) {
    room = std::make_shared<Room>();
    room->name = name;
    room->members = members;
  }
  return room;
}

std::unique_ptr<Group> Hub::make_group(const std::string& name, const std::vector<int>& members,
                                       int self, std::shared_ptr<Poison> poison) {
  return std::make_unique<HubGroup>(*this, room(name, members), self, std::move(poison));
}

void Hub::wake_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, room] : rooms_) {
    const std::lock_guard room_lock(room->mutex);
    room->changed.notify_all();
  }
  met_.notify_all();
}

void Hub::reset() {
  const std::lock_guard lock(mutex_);
  abandoned_ = false;
  for (const auto& [name, room] : rooms_) {
    const std::lock_guard room_lock(room->mutex);
    room->open.clear();
    ++room->generation;
  }
}

void Hub::abandon() {
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
  met_.notify_all();
}

void Hub::meet(int ranks) {
  std::unique_lock lock(mutex_);
  const std::uint64_t round = meeting_round_;
  if (++meeting_count_ == ranks) {
    meeting_count_ = 0;
    ++meeting_round_;
    met_.notify_all();
    return;
  }
  met_.wait_for(lock, timeout_, [&] { return meeting_round_ != round || abandoned_; });
  if (meeting_round_ != round) return;
  throw PeerLost(concat("recover: only ", meeting_count_--, " of ", ranks, " ranks came within ",
                        in_seconds(timeout_)));
}

void Hub::bend_for_tests(Bend bend) {
  const std::lock_guard lock(mutex_);
  bend_ = std::make_shared<const Bend>(std::move(bend));
}

}  // namespace tessera::comm
