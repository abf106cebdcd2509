#include "comm/backends/in_process/in_process.h"

#include "base/mutex.h"
#include "base/printable.h"
#include "base/test_hooks.h"
#include "comm/batch.h"
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
  std::vector<Batch> staged;  // test_hooks::deliver_at_wait: the results until each rank waits
};

/// What the members of one group share.
struct Hub::Room {
  std::string name;
  std::vector<int> members;
  base::Mutex mutex;
  base::Condition changed;
  std::map<std::uint64_t, std::shared_ptr<Meeting>> open TESSERA_GUARDED_BY(mutex);
  std::uint64_t generation TESSERA_GUARDED_BY(mutex) = 0;
};

namespace {

/// Calls act(ops) with the op of every rank at `index`: all of one type, since their entries agree.
template <class Act>
auto with_all(const std::vector<Batch>& batches, std::size_t index, Act act) {
  const auto with = [&]<class One>(const One& /*first*/) {
    std::vector<const One*> of_all_ranks;
    for (const Batch& batch : batches) of_all_ranks.push_back(&std::get<One>(batch.ops[index]));
    return act(of_all_ranks);
  };
  return std::visit(with, batches.front().ops[index]);
}

void run(const std::vector<Batch>& batches) {
  for (std::size_t op = 0; op < batches.front().ops.size(); ++op) {
    with_all(batches, op, []<class One>(const std::vector<const One*>& ranks) { One::run(ranks); });
  }
}

/// The first pair of ranks of which one sends what the other does not expect.
std::string count_disagreement(const Hub::Room& room, const Hub::Meeting& meeting) {
  const auto& batches = meeting.batches;
  const Batch& first = batches.front();
  for (std::size_t op = 0; op < first.ops.size(); ++op) {
    const auto found = with_all(batches, op, []<class One>(const std::vector<const One*>& ranks) {
      return One::find_difference(ranks);
    });
    if (!found) continue;
    const auto facts = std::visit([](const auto& one) { return one.facts(); }, first.ops[op]);
    return concat("ranks disagree: ", to_string(facts.kind), " of ", first.label.unit, ": rank ",
                  room.members[found->from], " sends ", found->sent, " elements but rank ",
                  room.members[found->to], " expects ", found->expected, " (group ", room.name,
                  ")");
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
  for (Op& op : copy.ops) op = std::visit([](const auto& one) -> Op { return one.cloned(); }, op);
  return copy;
}

void deliver(const Batch& staged, const Batch& batch) {
  for (std::size_t i = 0; i < batch.ops.size(); ++i) {
    std::visit([&]<class One>(const One& to) { std::get<One>(staged.ops[i]).deliver(to); },
               batch.ops[i]);
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
    base::Lock lock(room_->mutex);
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
    if (const auto hook = test_hooks::before_issue.get()) {
      (*hook)(room_->members[static_cast<std::size_t>(self_)], batch);
    }
    const Joined joined = join(std::move(batch));
    if (joined.last) {
      const auto late = test_hooks::deliver_at_wait.get();
      complete(*joined.meeting, late && (*late)());
    }
    return std::make_unique<HubWork>(room_, joined.meeting, self_, hub_.timeout_, poison_);
  }

 private:
  struct Joined {
    std::shared_ptr<Hub::Meeting> meeting;
    bool last;
  };

  Joined join(Batch batch) {
    const base::Lock lock(room_->mutex);
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
    const base::Lock lock(room_->mutex);
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
  const base::Lock lock(mutex_);
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
  const base::Lock lock(mutex_);
  for (const auto& [name, room] : rooms_) {
    const base::Lock room_lock(room->mutex);
    room->changed.notify_all();
  }
  met_.notify_all();
}

void Hub::reset() {
  const base::Lock lock(mutex_);
  abandoned_ = false;
  for (const auto& [name, room] : rooms_) {
    const base::Lock room_lock(room->mutex);
    room->open.clear();
    ++room->generation;
  }
}

void Hub::abandon() {
  const base::Lock lock(mutex_);
  abandoned_ = true;
  met_.notify_all();
}

void Hub::meet(int ranks) {
  base::Lock lock(mutex_);
  const std::uint64_t round = meeting_round_;
  if (++meeting_count_ == ranks) {
    meeting_count_ = 0;
    ++meeting_round_;
    met_.notify_all();
    return;
  }
  met_.wait_for(lock, timeout_,
                [&]() TESSERA_REQUIRES(mutex_) { return meeting_round_ != round || abandoned_; });
  if (meeting_round_ != round) return;
  throw PeerLost(concat("recover: only ", meeting_count_--, " of ", ranks, " ranks came within ",
                        in_seconds(timeout_)));
}

namespace {

class HubConnections final : public Connections {
 public:
  explicit HubConnections(Hub& hub) : hub_(hub) {}
  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    return hub_.make_group(place.name, place.ranks, place.self(), place.poison);
  }

 private:
  Hub& hub_;
};

}  // namespace

std::unique_ptr<Connections> open_in_process(Hub& hub) {
  return std::make_unique<HubConnections>(hub);
}

}  // namespace tessera::comm
