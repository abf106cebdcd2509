#include "comm/backends/gloo/transport.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <thread>

#include "base/environment.h"
#include "base/interrupt.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Gloo's message without its source location and its advice.
std::string gloo_reason(const std::string& error) {
  const std::string what = one_line(error);
  auto begin = what.find("] ");
  begin = what.starts_with('[') && begin != std::string::npos ? begin + 2 : 0;
  return what.substr(begin, what.find(". ", begin) - begin);
}

}  // namespace

// A peer whose own wait has timed out closes its connections before it can say for which rank it
// waited; one that has died says nothing. This rank waits for the peer's message before it blames
// the peer: messages travel through the store, which each rank reads now and then. The peer may
// first listen to others itself, and be slow on a busy machine: its heartbeats distinguish it from
// one that has died. It is not waited for until the deadline, which may be far away, since a
// connection between two live ranks can break, too. A read that does not return tells of the
// store's host, for which all the ranks that this rank would blame may be waiting.
bool hear_others(const AbortFlag& abort_flag, WaitBoard& board, int peer,
                 std::optional<std::chrono::steady_clock::time_point> deadline,
                 const std::string& what) {
  const auto check_aborted = [&] {
    if (abort_flag.is_set()) abort_flag.raise(what);
  };
  const bool blames_store = board.store_rank() == peer;
  const WaitBoard::Doubt doubt(board, peer);
  const auto words = abort_flag.patience.words();
  const auto begin = std::chrono::steady_clock::now();
  const auto first_end = begin + words;
  const auto last_end = deadline ? std::clamp(*deadline + words, first_end + words,
                                              begin + WatchTimes::explaining(words))
                                 : first_end;
  bool lives = false;
  base::InterruptTimer timer;
  for (auto end = first_end;;) {
    check_aborted();
    abort_flag.ask_interrupt(timer);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto now = std::chrono::steady_clock::now();
    if (const auto beat = doubt.last_beat()) {
      lives = now < *beat + words;
      end = std::min(*beat + words, last_end);
    }
    if (now >= end && (blames_store || !board.looks_since_before(end))) break;
  }
  check_aborted();
  return lives && deadline && *deadline <= std::chrono::steady_clock::now();
}

std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience) {
  // All have come between the end of the wait and the check for missing ranks.
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

ChannelOptions channel_options(const GroupPlace& place) {
  ChannelOptions channel;
  channel.name = place.name;
  channel.members = place.ranks;
  channel.self = place.self();
  channel.timeout = place.options.timeout;
  channel.compare_entries =
      place.options.compare_entries || base::environment_switch("TESSERA_COMPARE_ENTRIES");
  channel.abort_flag = place.abort_flag;
  channel.board = place.board;
  return channel;
}

Channel::Channel(ChannelOptions what)
    : options(std::move(what)),
      log(std::make_shared<FlightRecorder>(options.name, options.board.get())),
      lines(options.members.size()) {
  options.board->add(log);
}

// A group whose opening has failed loses its log, too: the next attempt makes another.
Channel::~Channel() { options.board->remove(*log); }

Channel::Posted Channel::post(End end, int peer, const at::Tensor& memory, int tag) const {
  const Line& line = lines[static_cast<std::size_t>(peer)];
  std::vector<at::Tensor> tensors{memory};
  try {
    return end == End::kSend ? line.backend->send(tensors, line.rank, tag)
                             : line.backend->recv(tensors, line.rank, tag);
  } catch (const std::exception& error) {
    throw NotPosted(peer, gloo_reason(error.what()));
  }
}

at::Tensor Channel::take_buffer(std::int64_t bytes) {
  at::Tensor taken;
  {
    const base::Lock lock(mutex_);
    taken = free_buffers_.take(bytes).memory;
  }
  return taken.defined() ? taken : at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

void Channel::recycle(at::Tensor buffer) {
  const base::Lock lock(mutex_);
  free_buffers_.recycle({std::move(buffer)});
}

std::optional<PeerWait> TransportWait::waits_for() const {
  const int peer = peer_;
  return standing(peer < 0 ? -1 : world_rank(peer));
}

std::string TransportWait::waited_in_vain_for(int rank) const {
  return waited_in_vain(text(), patience_, {rank}, options().abort_flag->patience);
}

void TransportWait::check_aborted() const {
  if (options().abort_flag->is_set()) options().abort_flag->raise(before_reason());
}

void TransportWait::begin() {
  patience_ = options().abort_flag->patience.of(options().timeout);
  deadline_ = std::chrono::steady_clock::now() + patience_;
}

namespace {

/// Gloo's own timeout would close the connections: a wait that runs the interrupt check is aborted,
/// and begins again.
class WakesTransfer final : public base::WakesWait {
 public:
  explicit WakesTransfer(c10d::Work& transfer) : transfer_(transfer) { begin(); }
  ~WakesTransfer() { end(); }

 private:
  void wake() override { transfer_.abort(); }

  c10d::Work& transfer_;
};

}  // namespace

void TransportWait::wait_for(c10d::Work& transfer, int peer) {
  using std::chrono::milliseconds;
  peer_ = peer;
  const WakesTransfer wakes(transfer);
  base::InterruptTimer timer;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now());
    try {
      if (transfer.wait(std::max(left, milliseconds(1)))) return;
    } catch (const std::exception& error) {
      fail(peer, error.what());
    }
    // The abort of another thread's wait may have ended this one, too: then it begins again.
    check_aborted();
    options().abort_flag->ask_interrupt(timer);
  }
}

void TransportWait::fail(int peer, const std::string& what) {
  check_aborted();
  // Gloo uses another clock and may end a little before our deadline.
  if (is_over() || what.find("Timed out waiting") != std::string::npos) time_is_up(peer);
  blame(peer, concat("lost rank ", world_rank(peer), ": ", gloo_reason(what)));
}

void TransportWait::blame(int peer, const std::string& lost) {
  // A wait that has begun stays on the board: the peer may itself wait for a third rank, and ranks
  // that wait for this one follow its wait to that rank. A rank that came late but could still post
  // is followed as well, until the peer's message has come. A post is not on the board: it has
  // begun no wait, and a rank that came too late must not lead others to a peer that delays no
  // rank.
  peer_ = peer;
  if (patience_.count() == 0) begin();
  if (hear_others(*options().abort_flag, *options().board, world_rank(peer), deadline_,
                  before_reason())) {
    blame_cause(peer);
  }
  throw LostRank(concat(text(), ": ", lost));
}

void TransportWait::blame_connection(const NotPosted& failed) {
  blame(failed.peer,
        concat("the connection to rank ", world_rank(failed.peer), " is gone: ", failed.what()));
}

void TransportWait::blame_cause(int peer) const {
  const PeerWait wait = standing(world_rank(peer));
  const auto cause = options().board->cause_of(wait.group, wait.sequence);
  throw LostRank(waited_in_vain_for(cause.value_or(world_rank(peer))));
}

}  // namespace tessera::comm
