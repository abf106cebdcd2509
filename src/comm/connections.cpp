#include "comm/connections.h"

#include <atomic>
#include <future>
#include <thread>

#include "base/one_line.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kLookAgain{2};

using Backend = c10::intrusive_ptr<c10d::Backend>;

struct Attempt {
  int peer;
  std::future<Backend> opened;
};

/// The thread keeps alive what it uses, and ends by itself if nobody waits for it any more.
Attempt attempt(int peer, const Channel& channel, int epoch) {
  std::packaged_task<Backend()> open(
      [open_pair = channel.options.open_pair, epoch, peer] { return open_pair(epoch, peer); });
  auto opened = open.get_future();
  std::thread(std::move(open)).detach();
  return {peer, std::move(opened)};
}

class Connecting final : public Blocked {
 public:
  Connecting(const Channel& channel, std::uint64_t sequence)
      : channel_(channel), sequence_(sequence) {}

  void abort() override {}  // finish() looks at the poison
  std::optional<PeerWait> waits_for() const override {
    const int peer = peer_;
    return channel_.log->wait_for(sequence_, peer < 0 ? -1 : world_rank(peer));
  }

  Backend finish(Attempt& one, std::chrono::steady_clock::time_point deadline) {
    peer_ = one.peer;
    const auto& poison = *channel_.options.poison;
    const auto in_time = [&] { return std::chrono::steady_clock::now() < deadline; };
    while (one.opened.wait_for(kLookAgain) != std::future_status::ready) {
      poison.check();
      if (!in_time()) return {};
    }
    try {
      return one.opened.get();
    } catch (const std::exception& error) {
      if (!in_time()) return {};
      hear_others(poison);
      throw PeerLost(concat(channel_.log->wait_for(sequence_, -1).text, ": cannot connect to rank ",
                            world_rank(one.peer), ": ", one_line(error.what())));
    }
  }

 private:
  int world_rank(int peer) const {
    return channel_.options.members[static_cast<std::size_t>(peer)];
  }

  const Channel& channel_;
  const std::uint64_t sequence_;
  std::atomic<int> peer_{-1};
};

}  // namespace

void connect_to(const std::vector<int>& peers, Channel& channel, int epoch,
                std::uint64_t sequence) {
  std::vector<Attempt> attempts;
  for (const int peer : peers) {
    if (!channel.lines[static_cast<std::size_t>(peer)].backend) {
      attempts.push_back(attempt(peer, channel, epoch));
    }
  }
  if (attempts.empty()) return;
  Connecting wait(channel, sequence);
  const OnBoard on_board(*channel.options.board, wait);
  const Poison& poison = *channel.options.poison;
  const auto patience = poison.patience.of(channel.options.timeout);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (Attempt& one : attempts) {
    const auto index = static_cast<std::size_t>(one.peer);
    if (auto backend = wait.finish(one, deadline)) {
      channel.lines[index] = {std::move(backend), one.peer < channel.options.self ? 0 : 1};
      continue;
    }
    poison.check();
    const auto cause = channel.options.board->cause_of(channel.log->group_hash(), sequence);
    throw PeerLost(waited_in_vain(channel.log->wait_for(sequence, -1).text, patience,
                                  {cause.value_or(channel.options.members[index])},
                                  poison.patience));
  }
}

}  // namespace tessera::comm
