#include "comm/backends/gloo/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "base/text/printable.h"
#include "comm/batch.h"
#include "comm/ops/steps.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Thrown from a post to posting().
struct NotPosted : std::runtime_error {
  NotPosted(int to, const std::string& reason) : std::runtime_error(reason), peer(to) {}
  int peer;
};

/// The bytes as c10d takes them. The exchange keeps what owns them.
std::vector<at::Tensor> as_bytes(const void* data, std::int64_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {bytes}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

std::string gloo_reason(const std::string& error) {
  const std::string what = one_line(error);
  auto begin = what.find("] ");
  begin = what.starts_with('[') && begin != std::string::npos ? begin + 2 : 0;
  return what.substr(begin, what.find(". ", begin) - begin);
}

// A peer whose own wait has timed out closes its connections before it can say for whom it waited;
// one that has died says nothing. Its words are waited for before it is blamed itself: they travel
// through the store, at which each rank looks now and then. It may itself hear others first, and be
// slow to say it on a busy machine: its heartbeats distinguish it from one that has died. It is not
// waited for until the deadline, which may be far, since between two ranks that live a connection
// can break, too. A look that does not end tells of the store's host, for whom all those may wait
// that this rank would blame.
bool hear_others(const AbortFlag& abort_flag, WaitBoard& board, int peer,
                 std::optional<std::chrono::steady_clock::time_point> deadline) {
  const bool blames_store = board.store_rank() == peer;
  const WaitBoard::Doubt doubt(board, peer);
  const auto words = abort_flag.patience.words();
  const auto begin = std::chrono::steady_clock::now();
  const auto first_end = begin + words;
  const auto last_end = deadline ? std::clamp(*deadline + words, first_end + words,
                                              begin + WatchTimes::explaining(words))
                                 : first_end;
  bool lives = false;
  for (auto end = first_end;;) {
    abort_flag.check();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto now = std::chrono::steady_clock::now();
    if (const auto beat = doubt.last_beat()) {
      lives = now < *beat + words;
      end = std::min(*beat + words, last_end);
    }
    if (now >= end && (blames_store || !board.looks_since_before(end))) break;
  }
  abort_flag.check();
  return lives && deadline && *deadline <= std::chrono::steady_clock::now();
}

std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience) {
  // All have come between the end of the wait and the look at who is missing.
  if (world_ranks.empty()) {
    return concat(
        what, ": waited ", in_seconds(time),
        " and found every rank there once that was over, expected them in time; they were "
        "late, or this rank itself stood still (stopped, or without a core): raise "
        "comm.timeout_seconds where that happens");
  }
  return concat(what, ": waited ", in_seconds(time), " for rank ", joined(world_ranks),
                patience.why_missing(world_ranks));
}

Channel::Channel(ChannelOptions what)
    : options(std::move(what)),
      log(std::make_shared<FlightRecorder>(options.name)),
      lines(options.members.size()) {
  options.board->add(log);
}

// Also of a group whose opening has failed: the next attempt at it has a log of its own.
Channel::~Channel() { options.board->remove(*log); }

at::Tensor Channel::take_buffer(std::int64_t bytes) {
  at::Tensor taken;
  {
    const base::Lock lock(mutex_);
    taken = free_buffers_.take(bytes).memory;
  }
  return taken.defined() ? taken : at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

void Channel::give_back(at::Tensor buffer) {
  const base::Lock lock(mutex_);
  free_buffers_.give_back({std::move(buffer)});
}

Exchange::Exchange(std::shared_ptr<Channel> channel, Batch batch, std::shared_ptr<const Entry> of,
                   std::uint64_t fingerprint)
    : channel_(std::move(channel)),
      batch_(std::move(batch)),
      of_(std::move(of)),
      fingerprint_(fingerprint) {
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) {
    under_way_.emplace_back(
        *this, i,
        std::visit(
            [&](const auto& op) { return op.steps(channel_->size(), channel_->options.self); },
            batch_.ops[i]));
  }
}

Exchange::~Exchange() {
  // Gloo lets go of a buffer when its work object goes; only then may the memory be used again.
  for (UnderWay& op : under_way_) {
    op.receives.clear();
    op.sends.clear();
  }
  release_buffers();
}

void Exchange::release_buffers() {
  for (UnderWay& op : under_way_) {
    if (op.received.defined()) channel_->give_back(std::move(op.received));
    op.received = at::Tensor();
  }
}

int Exchange::world_rank(int peer) const {
  return channel_->options.members[static_cast<std::size_t>(peer)];
}

std::string Exchange::text() const {
  Entry entry;
  describe(batch_, of_->sequence, entry);
  return concat(to_string(entry), " on group ", channel_->options.name);
}

void Exchange::begin_wait() {
  const ChannelOptions& options = channel_->options;
  patience_ = options.abort_flag->patience.of(options.timeout);
  deadline_ = std::chrono::steady_clock::now() + patience_;
}

void Exchange::blame(int peer, const std::string& lost) {
  const ChannelOptions& options = channel_->options;
  // A wait that has begun stays on the board: the peer may itself wait for a third rank, and ranks
  // that wait for this one follow its wait to that rank. A rank that came late, but could still post,
  // is followed as well until the peer's words have come. start() is not on the board: it has begun
  // no wait, and from a rank that came too late nobody is to follow to a peer that holds up none.
  waits_for_ = peer;
  if (patience_.count() == 0) begin_wait();  // wait() has not begun
  if (hear_others(*options.abort_flag, *options.board, world_rank(peer), deadline_)) {
    blame_cause(peer);
  }
  throw LostRank(concat(text(), ": ", lost));
}

void Exchange::blame_cause(int peer) const {
  const ChannelOptions& options = channel_->options;
  const auto cause = options.board->cause_of(channel_->log->group_hash(), of_->sequence);
  throw LostRank(waited_in_vain(text(), patience_, {cause.value_or(world_rank(peer))},
                                options.abort_flag->patience));
}

/// Hears others without the lock, for which an abort may wait that holds the board's.
template <class Post>
void Exchange::posting(const Post& post) {
  std::optional<NotPosted> failed;
  try {
    post();
  } catch (const NotPosted& error) {
    failed = error;
  }
  if (!failed) return;
  // A transfer cannot even begin: the connection is closed already.
  blame(failed->peer,
        concat("the connection to rank ", world_rank(failed->peer), " is gone: ", failed->what()));
}

int Exchange::UnderWay::size() const { return exchange_.channel_->size(); }
int Exchange::UnderWay::self() const { return exchange_.channel_->options.self; }

int Exchange::UnderWay::tag_of(int phase) const {
  const std::size_t place = index_ + exchange_.batch_.ops.size() * static_cast<std::size_t>(phase);
  return transfer_tag(exchange_.fingerprint_, exchange_.of_->sequence, place);
}

void Exchange::UnderWay::receive(int peer, void* to, std::int64_t bytes, int phase) {
  if (bytes == 0) return;
  auto tensors = as_bytes(to, bytes);
  try {
    const Line& line = exchange_.channel_->lines[static_cast<std::size_t>(peer)];
    receives.push_back({line.backend->recv(tensors, line.rank, tag_of(phase)), peer});
  } catch (const std::exception& error) {
    throw NotPosted(peer, gloo_reason(error.what()));
  }
}

void Exchange::UnderWay::send(int peer, const void* from, std::int64_t bytes, int phase) {
  if (bytes == 0) return;
  auto tensors = as_bytes(from, bytes);
  try {
    const Line& line = exchange_.channel_->lines[static_cast<std::size_t>(peer)];
    sends.push_back({line.backend->send(tensors, line.rank, tag_of(phase)), peer});
    exchange_.posted_bytes_ += bytes;
  } catch (const std::exception& error) {
    throw NotPosted(peer, gloo_reason(error.what()));
  }
}

void Exchange::UnderWay::take_aside(std::int64_t bytes) {
  received = exchange_.channel_->take_buffer(bytes);
}

std::byte* Exchange::UnderWay::aside(std::int64_t offset) { return at_byte(received, offset); }

void Exchange::UnderWay::finish_receive(std::size_t index) { exchange_.finish(receives[index]); }
void Exchange::UnderWay::finish_receives() { exchange_.finish(receives); }
void Exchange::UnderWay::finish_sends() { exchange_.finish(sends); }

void Exchange::UnderWay::post_more(Earlier earlier, const std::function<void()>& post) {
  exchange_.posting([&] {
    const base::Lock lock(exchange_.mutex_);
    exchange_.channel_->options.abort_flag->check();
    if (earlier == Earlier::kFinished) {
      receives.clear();
      sends.clear();
    }
    post();
  });
}

void Exchange::start() {
  for (UnderWay& op : under_way_) op.steps->prepare(op);
  // A transfer whose receiver is ready goes out without a round trip: receives come first.
  posting([&] {
    for (UnderWay& op : under_way_) op.steps->post_receives(op);
    for (UnderWay& op : under_way_) op.steps->post_sends(op);
  });
}

void Exchange::abort() {
  const base::Lock lock(mutex_);
  for (UnderWay& op : under_way_) {
    for (Transfer& transfer : op.receives) transfer.work->abort();
    for (Transfer& transfer : op.sends) transfer.work->abort();
  }
}

std::optional<PeerWait> Exchange::waits_for() const {
  const int peer = waits_for_;
  return channel_->log->wait_for(*of_, peer < 0 ? -1 : world_rank(peer));
}

void Exchange::wait() {
  if (done_) return;
  if (failure_) std::rethrow_exception(failure_);
  const OnBoard on_board(*channel_->options.board, *this);
  begin_wait();
  try {
    channel_->options.abort_flag->check();  // after this, whoever aborts finds us on the board
    for (UnderWay& op : under_way_) op.steps->finish(op);
    for (UnderWay& op : under_way_) {
      finish(op.receives);
      finish(op.sends);
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  check_posted();
  release_buffers();
  batch_.ops.clear();
  done_ = true;
}

void Exchange::check_posted() const {
  const std::int64_t expected = sent_bytes(batch_, channel_->size(), channel_->options.self);
  TESSERA_INVARIANT(posted_bytes_ == expected, text(), ": sent ", posted_bytes_, " B, expected ",
                    expected);
}

void Exchange::finish(std::vector<Transfer>& transfers) {
  for (Transfer& transfer : transfers) finish(transfer);
}

void Exchange::finish(Transfer& transfer) {
  using std::chrono::milliseconds;
  if (transfer.finished) return;
  waits_for_ = transfer.peer;
  const auto left =
      std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now());
  bool complete = false;
  try {
    complete = transfer.work->wait(std::max(left, milliseconds(1)));
  } catch (const std::exception& error) {
    fail(transfer, error.what());
  }
  if (!complete) fail(transfer, "aborted");
  transfer.finished = true;
}

std::vector<int> Exchange::not_arrived() {
  std::vector<int> ranks;
  for (UnderWay& op : under_way_) {
    for (auto* transfers : {&op.receives, &op.sends}) {
      for (Transfer& transfer : *transfers) {
        if (transfer.finished) continue;
        try {
          // Gloo has closed the connections after the timeout: what is not there throws at once.
          transfer.finished = transfer.work->wait(std::chrono::milliseconds(1));
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

void Exchange::fail(const Transfer& transfer, const std::string& what) {
  const ChannelOptions& options = channel_->options;
  const int peer = world_rank(transfer.peer);
  options.abort_flag->check();
  // Gloo waits by another clock and may be done a little before ours.
  const bool timed_out = what.find("Timed out waiting") != std::string::npos ||
                         std::chrono::steady_clock::now() >= deadline_;
  if (timed_out && !is_relayed()) {
    throw LostRank(waited_in_vain(text(), patience_, not_arrived(), options.abort_flag->patience));
  }
  if (!timed_out) blame(transfer.peer, concat("lost rank ", peer, ": ", gloo_reason(what)));
  // Of a relayed message the rank before may itself wait for another one. If it came later than
  // this one its time is up later: by then it says so, or the watch has seen it wait. On the board
  // meanwhile, as in blame().
  hear_others(*options.abort_flag, *options.board, peer);
  blame_cause(transfer.peer);
}

}  // namespace tessera::comm
