#include "comm/connections.h"

#include <ATen/ops/zeros.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "base/one_line.h"
#include "comm/batch.h"
#include "comm/exchange.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::uint64_t kGreeting = 0x6772656574ULL;
constexpr std::chrono::milliseconds kLookAgain{5};

/// What the connecting thread uses, and keeps alive if it is left to itself.
struct Attempt {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<int> peers;
  std::chrono::milliseconds timeout;
  std::atomic<int> peer{-1};  // the one that it waits for
  std::promise<void> done;

  void run() {
    try {
      const int tag = transfer_tag(kGreeting, 0, 0);
      struct Greeting {
        std::vector<at::Tensor> out, in;
        c10::intrusive_ptr<c10d::Work> sent, received;
      };
      std::vector<Greeting> greetings(peers.size());
      for (std::size_t i = 0; i < peers.size(); ++i) {
        Greeting& one = greetings[i];
        peer = peers[i];
        one.in = {at::zeros({1}, at::kByte)};
        one.out = {at::zeros({1}, at::kByte)};
        one.received = backend->recv(one.in, peers[i], tag);
        one.sent = backend->send(one.out, peers[i], tag);
      }
      for (std::size_t i = 0; i < peers.size(); ++i) {
        peer = peers[i];
        greetings[i].received->wait(timeout);
        greetings[i].sent->wait(timeout);
      }
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  }
};

class Connecting final : public Blocked {
 public:
  Connecting(const Attempt& attempt, const ChannelOptions& channel, const IssueLog& log,
             std::uint64_t sequence)
      : attempt_(attempt), channel_(channel), log_(log), sequence_(sequence) {}

  void abort() override {}  // require() looks at the poison
  std::optional<PeerWait> waits_for() const override {
    return log_.wait_for(sequence_, waited_for());
  }
  int waited_for() const {
    const int peer = attempt_.peer;
    return peer < 0 ? -1 : channel_.members[static_cast<std::size_t>(peer)];
  }

 private:
  const Attempt& attempt_;
  const ChannelOptions& channel_;
  const IssueLog& log_;
  const std::uint64_t sequence_;
};

}  // namespace

void Connections::require(const std::vector<int>& peers, const ChannelOptions& channel,
                          const c10::intrusive_ptr<c10d::Backend>& backend, const IssueLog& log,
                          std::uint64_t sequence) {
  connected_.resize(channel.members.size());
  const auto attempt = std::make_shared<Attempt>();
  for (const int peer : peers) {
    if (!connected_[static_cast<std::size_t>(peer)]) attempt->peers.push_back(peer);
  }
  if (attempt->peers.empty()) return;
  attempt->backend = backend;
  attempt->timeout = channel.poison->patience.of(channel.timeout);
  auto done = attempt->done.get_future();
  std::thread([attempt] { attempt->run(); }).detach();
  Connecting wait(*attempt, channel, log, sequence);
  const OnBoard on_board(*channel.board, wait);
  const auto what = log.wait_for(sequence, -1).text;
  const auto deadline = std::chrono::steady_clock::now() + attempt->timeout;
  const auto time_is_up = [&] { return std::chrono::steady_clock::now() >= deadline; };
  bool late = false;
  while (!late && done.wait_for(kLookAgain) != std::future_status::ready) {
    channel.poison->check();
    late = time_is_up();
  }
  try {
    if (!late) done.get();
  } catch (const std::exception& error) {
    late = time_is_up();
    if (!late) {
      hear_others(*channel.poison);
      throw PeerLost(concat(what, ": cannot connect to rank ", wait.waited_for(), ": ",
                            one_line(error.what())));
    }
  }
  if (late) {
    channel.poison->check();
    const auto cause = channel.board->cause_of(log.group_hash(), sequence);
    throw PeerLost(waited_in_vain(what, attempt->timeout, {cause.value_or(wait.waited_for())},
                                  channel.poison->patience));
  }
  for (const int peer : attempt->peers) connected_[static_cast<std::size_t>(peer)] = true;
}

}  // namespace tessera::comm
