#include "comm/backends/in_process/in_process.h"

#include <c10/core/GradMode.h>

#include <optional>

#include "base/mutex.h"
#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "comm/backends/in_process/mailbox.h"
#include "comm/backends/in_process/together.h"
#include "comm/batch.h"
#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::comm {

/// One collective: the batch of each member, then the outcome.
struct Rendezvous::Collective {
  std::uint64_t sequence = 0;
  std::vector<Batch> batches;
  std::vector<bool> came;
  int count = 0;
  bool done = false;
  std::string failure;
  std::vector<Batch> staged;  // test_hooks::deliver_at_wait: the results until each rank waits
  // For tensors on devices, one for each member:
  std::vector<Stream> streams;
  std::vector<Event> ends;  // of the collective on that stream
  /// Streams of members that destroyed their work before all ranks had come.
  std::vector<Stream> left_by;

  /// Returns the batches that run.
  const std::vector<Batch>& sent() const { return staged.empty() ? batches : staged; }
  /// Orders the stream of a member that destroys its work after the collective. Other members may
  /// hold the collective for longer, but not that member's memory, which is free after this point
  /// of the stream.
  void order_after(std::size_t member, const Stream& stream) {
    ends[member].block(stream, EventSite::kWorkEnd);
    batches[member].ops.clear();
  }
};

/// The state that the members of one group share.
struct Rendezvous::SharedGroup {
  std::string name;
  std::vector<int> members;
  base::Mutex mutex;
  base::Condition changed;
  std::map<std::uint64_t, std::shared_ptr<Collective>> open TESSERA_GUARDED_BY(mutex);
  std::uint64_t generation TESSERA_GUARDED_BY(mutex) = 0;
  const std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
};

namespace {

/// Orders each of the streams after all that was launched on any of them.
void meet(const std::vector<Stream>& streams) {
  std::vector<Event> came(streams.size());
  for (std::size_t i = 0; i < streams.size(); ++i) came[i].record(streams[i], EventSite::kPeers);
  for (const Stream& stream : streams) {
    for (const Event& event : came) event.block(stream, EventSite::kPeers);
  }
}

/// The ops at `index` are of one type, since their entries agree.
void run_on_devices(const std::vector<Batch>& batches, std::size_t index) {
  const auto run = [&]<class One>(const One& /*first*/) {
    std::vector<const One*> of_all_ranks;
    for (const Batch& batch : batches) of_all_ranks.push_back(&std::get<One>(batch.ops[index]));
    One::run_on_devices(of_all_ranks);
  };
  std::visit(run, batches.front().ops[index]);
}

/// Launches the collective of all members, from one thread.
void run_on_devices(Rendezvous::Collective& collective) {
  const auto& batches = collective.sent();
  meet(collective.streams);
  {
    const StreamsScope here(collective.streams);
    const c10::AutoGradMode no_grad(false);
    for (std::size_t op = 0; op < batches.front().ops.size(); ++op) run_on_devices(batches, op);
  }
  // Other ranks read a rank's memory, too.
  meet(collective.streams);
  for (std::size_t i = 0; i < collective.streams.size(); ++i) {
    collective.ends[i].record(collective.streams[i], EventSite::kWorkEnd);
  }
}

/// Names the first pair of ranks where one sends what the other does not expect.
std::string text_of(const ByteDifference& found, const Rendezvous::SharedGroup& shared,
                    const Batch& batch, std::size_t op) {
  const auto facts = std::visit([](const auto& one) { return one.facts(); }, batch.ops[op]);
  const auto element = static_cast<std::int64_t>(c10::elementSize(facts.wire));
  const auto member = [&](int index) { return shared.members[static_cast<std::size_t>(index)]; };
  return concat("ranks disagree: ", to_string(facts.kind), " of ", batch.label.unit, ": rank ",
                member(found.from), " sends ", found.sent / element, " elements but rank ",
                member(found.to), " expects ", found.expected / element, " (group ", shared.name,
                ")");
}

/// Returns "" when all members mean the same collective.
std::string disagreement(const Rendezvous::SharedGroup& shared,
                         const Rendezvous::Collective& collective) {
  Entry first;
  describe(collective.batches.front(), collective.sequence, first);
  for (std::size_t other = 1; other < collective.batches.size(); ++other) {
    Entry entry;
    describe(collective.batches[other], collective.sequence, entry);
    if (entry.fingerprint == first.fingerprint) continue;
    return concat("ranks disagree: rank ", shared.members.front(), " issues ", to_string(first),
                  " but rank ", shared.members[other], " issues ", to_string(entry), " (group ",
                  shared.name, ")");
  }
  return {};
}

/// Runs the collective unless members disagree. Returns the disagreement; "" where there is none.
std::string run(const Rendezvous::SharedGroup& shared, Rendezvous::Collective& collective) {
  if (std::string found = disagreement(shared, collective); !found.empty()) return found;
  const auto& batches = collective.sent();
  const auto& first = batches.front();
  const bool on_devices = !collective.streams.empty();
  for (std::size_t op = 0; op < first.ops.size(); ++op) {
    // A relayed op has one size, since the entries agree, and is in the host's memory.
    if (on_devices && is_relayed(first.ops[op], static_cast<int>(batches.size()))) continue;
    const auto found = on_devices ? difference_between(batches, op) : run_together(batches, op);
    if (found) return text_of(*found, shared, first, op);
  }
  if (on_devices) run_on_devices(collective);
  return {};
}

/// Copies each member's batch, on that member's stream.
void stage(Rendezvous::Collective& collective) {
  for (std::size_t i = 0; i < collective.batches.size(); ++i) {
    const StreamScope there(collective.streams.empty() ? Stream() : collective.streams[i]);
    collective.staged.push_back(cloned(
        collective.batches[i], [](const at::Tensor& of, Values /*values*/) { return of.clone(); }));
  }
}

}  // namespace

class InProcessWork : public Work {
 public:
  /// The part for tensors on a device: `waits` is told that this rank waits for the log's entry.
  struct OnDevice {
    std::shared_ptr<const FlightRecorder> log;
    std::shared_ptr<const Entry> entry;
    std::shared_ptr<HostWaits> waits;
  };

  InProcessWork(std::shared_ptr<Rendezvous::SharedGroup> shared,
                std::shared_ptr<Rendezvous::Collective> collective, int self,
                std::chrono::milliseconds timeout, std::shared_ptr<AbortFlag> abort_flag,
                std::optional<OnDevice> on_device)
      : shared_(std::move(shared)),
        collective_(std::move(collective)),
        self_(static_cast<std::size_t>(self)),
        timeout_(timeout),
        abort_flag_(std::move(abort_flag)),
        on_device_(std::move(on_device)) {}
  ~InProcessWork() override {
    if (done_ || !on_device_) return;
    try {
      const base::Lock lock(shared_->mutex);
      const Stream here = Stream::current(collective_->streams[self_].device());
      if (collective_->done) {
        collective_->order_after(self_, here);
      } else {
        collective_->left_by[self_] = here;
      }
    } catch (...) {
      // An error is propagating already, so no caller has waited for this work.
    }
  }

  void wait() override {
    if (done_) return;
    const std::chrono::milliseconds patience = abort_flag_->patience.of(timeout_);
    base::Lock lock(shared_->mutex);
    // Done or aborted. The interrupt check runs without the lock.
    const auto deadline = std::chrono::steady_clock::now() + patience;
    bool in_time = false;
    for (base::InterruptTimer timer;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      const bool asks = base::may_ask_interrupt() && left > base::kAsksEvery;
      in_time = shared_->changed.wait_for(lock, asks ? base::kAsksEvery : left, [&] {
        return collective_->done || abort_flag_->is_set();
      });
      if (in_time || !asks) break;
      lock.unlock();
      abort_flag_->ask_interrupt(timer);
      lock.lock();
    }
    if (collective_->done && !collective_->failure.empty()) {
      throw Error(ErrorKind::kComm, collective_->failure);
    }
    if (!collective_->done) {
      abort_flag_->check();
      if (!in_time) throw LostRank(missing(patience));
    }
    if (on_device_) {
      deliver_on_device();
    } else if (!collective_->staged.empty()) {
      deliver(collective_->staged[self_], collective_->batches[self_]);
    }
    done_ = true;
  }

 private:
  void deliver_on_device() {
    const Stream& stream = collective_->streams[self_];
    if (!collective_->staged.empty()) {
      const StreamScope there(stream);
      deliver(collective_->staged[self_], collective_->batches[self_]);
      collective_->staged[self_] = {};
      collective_->ends[self_].record(stream, EventSite::kWorkEnd);
    }
    if (on_device_->waits) {
      on_device_->waits->waited_for(
          {[log = on_device_->log, entry = on_device_->entry] { return log->wait_for(*entry); }},
          collective_->ends[self_]);
    }
    collective_->order_after(self_, Stream::current(stream.device()));
  }

  std::string missing(std::chrono::milliseconds patience) const {
    Entry entry;
    describe(collective_->batches[self_], collective_->sequence, entry);
    std::vector<int> ranks;
    for (std::size_t i = 0; i < collective_->came.size(); ++i) {
      if (!collective_->came[i]) ranks.push_back(shared_->members[i]);
    }
    return concat(to_string(entry), " on group ", shared_->name, ": waited ", in_seconds(patience),
                  " for rank ", joined(ranks), abort_flag_->patience.why_missing(ranks));
  }

  std::shared_ptr<Rendezvous::SharedGroup> shared_;
  std::shared_ptr<Rendezvous::Collective> collective_;
  std::size_t self_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<AbortFlag> abort_flag_;
  std::optional<OnDevice> on_device_;
  bool done_ = false;
};

class InProcessGroup : public Group {
 public:
  InProcessGroup(Rendezvous& rendezvous, std::shared_ptr<Rendezvous::SharedGroup> shared,
                 const GroupPlace& place)
      : rendezvous_(rendezvous),
        shared_(std::move(shared)),
        self_(place.self()),
        abort_flag_(place.abort_flag),
        device_(place.device),
        log_(device_.is_cpu() ? nullptr : std::make_shared<FlightRecorder>(place.name)) {}

  int rank() const override { return self_; }
  int size() const override { return static_cast<int>(shared_->members.size()); }
  const std::string& name() const override { return shared_->name; }

  P2P& p2p() override {
    if (!p2p_) {
      p2p_ = open_mailbox(shared_->mailbox,
                          {shared_->members, self_, device_, abort_flag_, host_waits()},
                          rendezvous_.timeout_);
    }
    return *p2p_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    abort_flag_->check();
    require_no_p2p(p2p_.get(), name());
    check_batch(batch, size(), device_);
    if (const auto hook = test_hooks::before_issue.get()) {
      (*hook)(shared_->members[static_cast<std::size_t>(self_)], batch);
    }
    std::optional<InProcessWork::OnDevice> on_device;
    if (log_) {
      on_device = InProcessWork::OnDevice{log_, log_->record(batch, logged_++), host_waits()};
    }
    const Joined joined = join(std::move(batch));
    if (joined.last) {
      const auto late = test_hooks::deliver_at_wait.get();
      complete(*joined.collective, late && (*late)());
    }
    return std::make_unique<InProcessWork>(shared_, joined.collective, self_, rendezvous_.timeout_,
                                           abort_flag_, std::move(on_device));
  }

  struct Joined {
    std::shared_ptr<Rendezvous::Collective> collective;
    bool last;
  };

  Joined join(Batch batch) {
    const base::Lock lock(shared_->mutex);
    if (generation_ != shared_->generation) {
      generation_ = shared_->generation;
      next_sequence_ = 0;
    }
    const std::uint64_t sequence = next_sequence_++;
    auto& collective = shared_->open[sequence];
    if (!collective) {
      collective = std::make_shared<Rendezvous::Collective>();
      collective->sequence = sequence;
      collective->batches.resize(shared_->members.size());
      collective->came.resize(shared_->members.size());
      if (stream()) {
        collective->streams.resize(shared_->members.size());
        collective->ends.resize(shared_->members.size());
        collective->left_by.resize(shared_->members.size());
      }
    }
    const auto self = static_cast<std::size_t>(self_);
    collective->batches[self] = std::move(batch);
    collective->came[self] = true;
    if (stream()) collective->streams[self] = stream();
    Joined joined{collective, ++collective->count == size()};
    if (joined.last) shared_->open.erase(sequence);
    return joined;
  }

  /// Called by the last member, for all of them.
  void complete(Rendezvous::Collective& collective, bool deliver_at_wait) {
    if (deliver_at_wait) stage(collective);
    std::string failure = run(*shared_, collective);
    const base::Lock lock(shared_->mutex);
    collective.failure = std::move(failure);
    collective.done = true;
    for (std::size_t i = 0; i < collective.left_by.size(); ++i) {
      if (collective.left_by[i]) collective.order_after(i, collective.left_by[i]);
    }
    shared_->changed.notify_all();
  }

  Rendezvous& rendezvous_;
  std::shared_ptr<Rendezvous::SharedGroup> shared_;
  int self_;
  std::shared_ptr<AbortFlag> abort_flag_;
  const at::Device device_;
  const std::shared_ptr<FlightRecorder> log_;  // for tensors on a device
  std::uint64_t logged_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t next_sequence_ = 0;
  std::unique_ptr<P2P> p2p_;
};

std::shared_ptr<Rendezvous::SharedGroup> Rendezvous::shared(const std::string& name,
                                                            const std::vector<int>& members) {
  const base::Lock lock(mutex_);
  auto& shared = shared_groups_[name];
  if (!shared) {
    shared = std::make_shared<SharedGroup>();
    shared->name = name;
    shared->members = members;
  }
  return shared;
}

std::unique_ptr<Group> Rendezvous::make_group(const GroupPlace& place) {
  return std::make_unique<InProcessGroup>(*this, shared(place.name, place.ranks), place);
}

void Rendezvous::wake_all() {
  const base::Lock lock(mutex_);
  for (const auto& [name, shared] : shared_groups_) {
    const base::Lock group_lock(shared->mutex);
    shared->changed.notify_all();
    shared->mailbox->wake_all();
  }
  met_.notify_all();
}

void Rendezvous::reset() {
  const base::Lock lock(mutex_);
  abandoned_ = false;
  for (const auto& [name, shared] : shared_groups_) {
    const base::Lock group_lock(shared->mutex);
    shared->open.clear();
    ++shared->generation;
    shared->mailbox->reset();
  }
}

void Rendezvous::abandon() {
  const base::Lock lock(mutex_);
  abandoned_ = true;
  met_.notify_all();
}

void Rendezvous::meet(int ranks) {
  base::Lock lock(mutex_);
  const std::uint64_t round = round_;
  if (++arrived_ == ranks) {
    arrived_ = 0;
    ++round_;
    met_.notify_all();
    return;
  }
  met_.wait_for(lock, timeout_,
                [&]() TESSERA_REQUIRES(mutex_) { return round_ != round || abandoned_; });
  if (round_ != round) return;
  throw LostRank(concat("recover: only ", arrived_--, " of ", ranks, " ranks came within ",
                        in_seconds(timeout_)));
}

namespace {

class InProcessConnections final : public Connections {
 public:
  explicit InProcessConnections(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}
  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    return rendezvous_.make_group(place);
  }

 private:
  Rendezvous& rendezvous_;
};

}  // namespace

std::unique_ptr<Connections> open_in_process(Rendezvous& rendezvous) {
  return std::make_unique<InProcessConnections>(rendezvous);
}

}  // namespace tessera::comm
