#include "comm/backends/gloo/gloo_p2p.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/interrupt.h"
#include "base/mutex.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// Gloo's timeout closes all connections at its end, so it is given one that is never reached.
constexpr std::chrono::hours kNoEnd{24 * 365};

std::uint64_t message_key(const P2PTag& tag, int sender) {
  return Hasher()
      .add(tag.step)
      .add(static_cast<std::uint64_t>(tag.direction))
      .add(std::int64_t{tag.stage})
      .add(std::int64_t{tag.micro_batch})
      .add(std::int64_t{tag.index})
      .add(std::int64_t{sender})
      .digest();
}

/// Hashes everything on which both ends must agree.
std::uint64_t fingerprint_of(std::uint64_t key, const at::Tensor& tensor) {
  Hasher hash;
  hash.add(key).add(static_cast<std::uint64_t>(tensor.scalar_type()));
  for (const std::int64_t size : tensor.sizes()) hash.add(size);
  return hash.digest();
}

/// The hash under which the rank's order log has it (other_end): the same in every step.
std::uint64_t what_of(const P2POp& op) {
  const P2PTag& tag = op.tag;
  const std::uint64_t both = Hasher()
                                 .add(std::string_view("message"))
                                 .add(static_cast<std::uint64_t>(tag.direction))
                                 .add(std::int64_t{tag.stage})
                                 .add(std::int64_t{tag.micro_batch})
                                 .add(std::int64_t{tag.index})
                                 .digest();
  return (both & ~std::uint64_t{1}) | (op.sends() ? 1U : 0U);
}

/// Describes an op without its tensor.
class P2PIssue final : public Issue {
 public:
  explicit P2PIssue(const P2POp& op) : tag_(op.tag), sends_(op.sends()) {}
  IssueWords words() const override {
    const bool is_forward = tag_.direction == P2PTag::Direction::kForward;
    return {concat(sends_ ? "send of " : "receive of ", is_forward ? "activations" : "gradients"),
            concat("stage ", tag_.stage), static_cast<std::uint32_t>(tag_.micro_batch)};
  }

 private:
  const P2PTag tag_;
  const bool sends_;
};

}  // namespace

/// The messages that this rank has in flight to and from one other rank, for the failure watch,
/// which compares both ends. Written at every message, so no text is made. Threads: any.
class P2PLog final : public Recorded {
 public:
  /// `name` is the same at both ends.
  explicit P2PLog(std::string name) : name_(std::move(name)), hash_(hash_bytes(name_)) {}

  /// Errors: kInternal where this tag is in flight already.
  void post(const P2POp& op, std::uint64_t key, std::uint64_t fingerprint) {
    const base::Lock lock(mutex_);
    const bool twice = std::any_of(under_way_.begin(), under_way_.end(),
                                   [&](const Posted& one) { return one.key == key; });
    TESSERA_INVARIANT(!twice, to_string(op),
                      ": found it posted and not through, expected another tag");
    Posted& one = under_way_.emplace_back();
    one.key = key;
    one.fingerprint = fingerprint;
    one.op = op;
    one.op.tensor = at::Tensor();  // the tensor may be freed before its entry
    one.sizes.assign(op.tensor.sizes().begin(), op.tensor.sizes().end());
    one.dtype = op.tensor.scalar_type();
  }
  void end(std::uint64_t fingerprint) {
    const base::Lock lock(mutex_);
    std::erase_if(under_way_, [&](const Posted& one) { return one.fingerprint == fingerprint; });
  }
  void clear() {
    const base::Lock lock(mutex_);
    under_way_.clear();
  }

  std::string lines() const override {
    const base::Lock lock(mutex_);
    std::string text;
    for (const Posted& one : under_way_) {
      text += concat(name_, "\t", one.key, "\t", one.fingerprint, "\t", to_string(one.op), " (",
                     at::IntArrayRef(one.sizes), " ", c10::toString(one.dtype), ")\n");
    }
    return text;
  }
  IssuedHashes issued() const override {
    const base::Lock lock(mutex_);
    IssuedHashes issued{hash_, under_way_.size(), {}, /*of_messages=*/true};
    for (const Posted& one : under_way_) issued.latest.push_back(one.fingerprint);
    return issued;
  }
  std::uint64_t hash() const { return hash_; }

 private:
  struct Posted {
    std::uint64_t key = 0;  // the message's key, without its tensor
    std::uint64_t fingerprint = 0;
    P2POp op;  // without its tensor
    at::DimVector sizes;
    at::ScalarType dtype = at::kByte;
  };

  const std::string name_;
  const std::uint64_t hash_;
  mutable base::Mutex mutex_;
  std::vector<Posted> under_way_ TESSERA_GUARDED_BY(mutex_);
};

/// Gloo's part of a message, shared by the wait for it and the thread that polls it.
class Polled {
 public:
  enum class Found : std::uint8_t { kNothing, kThrough, kBroken };

  c10::intrusive_ptr<c10d::Work> work;
  std::atomic<Found> found{Found::kNothing};  // written by the thread of P2PPoll
};

/// Answers whether messages have ended. Gloo has no call for that: a wait that times out closes all
/// connections. So a thread waits, in turn, for the messages that done() was called for; it is
/// started at the first call. Threads: the rank's thread.
class P2PPoll {
 public:
  ~P2PPoll() { stop(); }

  /// Has the thread wait for `one` next.
  void ask(const std::shared_ptr<Polled>& one) {
    {
      const base::Lock lock(mutex_);
      if (at_hand_ == one || one->found != Polled::Found::kNothing) return;
      interrupt();  // it goes to the end of the row
      if (std::find(row_.begin(), row_.end(), one) == row_.end()) row_.push_back(one);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    }
    changed_.notify_all();
  }

  /// Returns when the thread no longer accesses `one`.
  void take_back(const std::shared_ptr<Polled>& one) {
    base::Lock lock(mutex_);
    std::erase(row_, one);
    if (at_hand_ != one) return;
    wanted_ = one.get();
    one->work->abort();
    changed_.wait(lock, [&]() TESSERA_REQUIRES(mutex_) { return at_hand_ != one; });
    wanted_ = nullptr;
  }

  void stop() {
    {
      const base::Lock lock(mutex_);
      stopping_ = true;
      row_.clear();
      interrupt();
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    const base::Lock lock(mutex_);
    stopping_ = false;
  }

 private:
  void run() {
    const base::NoInterrupts of_the_library;
    base::Lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&]() TESSERA_REQUIRES(mutex_) { return stopping_ || !row_.empty(); });
      if (stopping_) return;
      at_hand_ = std::move(row_.front());
      row_.pop_front();
      const auto one = at_hand_;
      lock.unlock();
      wait_for(*one);
      lock.lock();
      const bool again = one->found == Polled::Found::kNothing && wanted_ != one.get();
      if (again && !stopping_) row_.push_back(one);
      at_hand_ = nullptr;
      changed_.notify_all();
    }
  }

  /// Does nothing for a message that has ended.
  void interrupt() TESSERA_REQUIRES(mutex_) {
    if (at_hand_ && at_hand_->found == Polled::Found::kNothing) at_hand_->work->abort();
  }

  static void wait_for(Polled& one) {
    try {
      if (one.work->wait(kNoEnd)) one.found = Polled::Found::kThrough;
    } catch (const std::exception&) {
      one.found = Polled::Found::kBroken;  // the wait of the rank throws, too
    }
  }

  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<std::shared_ptr<Polled>> row_ TESSERA_GUARDED_BY(mutex_);
  std::shared_ptr<Polled> at_hand_ TESSERA_GUARDED_BY(mutex_);
  const Polled* wanted_ TESSERA_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class GlooPostedOp;

/// The messages in flight: Gloo's memory stays when a Transfer is destroyed before its message has
/// ended.
class MessagesInFlight {
 public:
  std::vector<std::shared_ptr<GlooPostedOp>> under_way;
  P2PPoll poll;
};

/// A message that was posted. Threads: the rank's thread; done() may be called on any thread.
class GlooPostedOp final : public PostedOp, private TransportWait {
 public:
  GlooPostedOp(std::shared_ptr<Channel> channel, std::shared_ptr<MessagesInFlight> in_flight,
               std::shared_ptr<P2PLog> log, P2POp op, std::uint64_t fingerprint)
      : PostedOp(std::move(op)),
        TransportWait(std::move(channel), op_.peer),
        in_flight_(std::move(in_flight)),
        log_(std::move(log)),
        fingerprint_(fingerprint) {}

  /// Errors: LostRank.
  void start();
  Event finish() override;
  std::optional<Event> poll() override;
  /// Ends it. Gloo does not access its memory any more.
  void lose();

 private:
  void abort() override { polled_->work->abort(); }
  PeerWait standing(int rank) const override {
    return {log_->hash(),
            fingerprint_,
            rank,
            concat(to_string(op_), " on group ", options().name),
            what_of(op_),
            /*is_message=*/true};
  }
  std::string text() const override { return to_string(op_); }
  std::string before_reason() const override { return text(); }
  std::string waited_in_vain_for(int rank) const override {
    return waited_in_vain(op_, patience_, rank, options().abort_flag->patience);
  }

  /// Errors: the error that its wait has thrown; LostRank where it was lost.
  void require_kept() const;
  void wait_for_gloo();
  void end();

  const std::shared_ptr<MessagesInFlight> in_flight_;
  const std::shared_ptr<P2PLog> log_;
  const std::uint64_t fingerprint_;
  std::uint64_t order_ = 0;  // its number in the rank's OrderLog
  const std::shared_ptr<Polled> polled_ = std::make_shared<Polled>();
  bool is_lost_ = false;
  bool asked_ = false;
  std::exception_ptr failure_;
};

void GlooPostedOp::start() {
  // The order log names it as the other end does, with the step.
  order_ = options().board->order().note(
      {kMessageLane, what_of(op_), fingerprint_, std::chrono::steady_clock::now(),
       op_.tag.direction == P2PTag::Direction::kForward ? Pass::kForward : Pass::kBackward},
      [&] { return std::make_shared<P2PIssue>(op_); });
  const int tag = message_number(op_.tag, op_.extent, fingerprint_);
  posting([&] {
    try {
      const auto end = op_.sends() ? Channel::End::kSend : Channel::End::kReceive;
      polled_->work = channel_->post(end, op_.peer, op_.tensor, tag);
    } catch (const NotPosted&) {
      log_->end(fingerprint_);
      throw;
    }
  });
}

void GlooPostedOp::require_kept() const {
  if (failure_) std::rethrow_exception(failure_);
  if (is_lost_) throw lost_in_recovery(op_);
}

void GlooPostedOp::end() {
  log_->end(fingerprint_);
  options().board->order().done(order_);
  polled_->work.reset();
  op_.tensor = at::Tensor();
  std::erase_if(in_flight_->under_way, [&](const auto& one) { return one.get() == this; });
}

void GlooPostedOp::lose() {
  polled_->work.reset();
  op_.tensor = at::Tensor();
  is_lost_ = true;
}

std::optional<Event> GlooPostedOp::poll() {
  require_kept();
  check_aborted();
  switch (polled_->found) {
    case Polled::Found::kThrough:
      end();
      return Event();
    case Polled::Found::kBroken:
      return finish();
    case Polled::Found::kNothing:
      break;
  }
  asked_ = true;
  in_flight_->poll.ask(polled_);
  return std::nullopt;
}

Event GlooPostedOp::finish() {
  require_kept();
  if (asked_) in_flight_->poll.take_back(polled_);
  asked_ = false;
  try {
    if (polled_->found != Polled::Found::kThrough) wait_for_gloo();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  end();
  return {};
}

void GlooPostedOp::wait_for_gloo() {
  const OnBoard on_board(*options().board, *this);
  begin();
  check_aborted();  // a later abort finds this wait on the board
  wait_for(*polled_->work, op_.peer);
}

GlooP2P::GlooP2P(std::shared_ptr<Channel> channel, std::function<void()> open)
    : P2P({channel->options.members, channel->options.self, at::kCPU, channel->options.abort_flag}),
      channel_(std::move(channel)),
      open_(std::move(open)),
      in_flight_(std::make_shared<MessagesInFlight>()) {}

GlooP2P::~GlooP2P() {
  reset();
  for (const auto& [peer, log] : logs_) channel_->options.board->remove(*log);
}

void GlooP2P::reset() {
  in_flight_->poll.stop();
  // Gloo releases a buffer when its work object is destroyed.
  for (const auto& op : std::exchange(in_flight_->under_way, {})) op->lose();
  for (const auto& [peer, log] : logs_) log->clear();
}

std::shared_ptr<P2PLog> GlooP2P::log_with(int peer) {
  auto& log = logs_[peer];
  if (!log) {
    const ChannelOptions& group = channel_->options;
    const auto low = static_cast<std::size_t>(std::min(rank(), peer));
    const auto high = static_cast<std::size_t>(std::max(rank(), peer));
    log = std::make_shared<P2PLog>(
        concat(group.name, ": between ", group.members[low], " and ", group.members[high]));
    group.board->add(log);
  }
  return log;
}

std::unique_ptr<Transfer> GlooP2P::post(P2POp op) {
  open_();
  if (op.tensor.numel() == 0) return std::make_unique<Transfer>(place(), nullptr);
  const auto log = log_with(op.peer);
  const std::uint64_t key = message_key(op.tag, op.sends() ? rank() : op.peer);
  const std::uint64_t fingerprint = fingerprint_of(key, op.tensor);
  log->post(op, key, fingerprint);
  auto posted =
      std::make_shared<GlooPostedOp>(channel_, in_flight_, log, std::move(op), fingerprint);
  posted->start();
  in_flight_->under_way.push_back(posted);
  return std::make_unique<Transfer>(place(), std::move(posted));
}

}  // namespace tessera::comm
