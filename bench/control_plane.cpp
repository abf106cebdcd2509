// What control messages cost a training step, by the number of ranks: messages, bytes and sockets
// of one rank, and time; and what the store is asked for.
//
//   control_plane --ranks N [--steps S]   N processes on this host: a line for messages that are
//                                         relayed, and one for everyone to everyone
//   control_plane --simulate N...         the same schedule and the same watches in simulated time
// bench/control_plane runs both for the table of docs/communication.md.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "comm/batch.h"
#include "comm/group.h"
#include "comm/ops/relay.h"
#include "simulated_watch.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace {

using tessera::World;
namespace comm = tessera::comm;
using Clock = std::chrono::steady_clock;

// Of a dense model with one micro-batch a step, in the order of a step (docs/communication.md).
struct Message {
  const char* what;
  std::int64_t bytes;
  enum class Form : std::uint8_t { kGather, kBits, kHashes, kCounts, kSum } form;
};
constexpr std::int64_t kParameters = 1000;
constexpr Message kStep[] = {
    {"unmasked targets", 8, Message::Form::kCounts},
    {"forward order", 16, Message::Form::kHashes},
    {"used parameters", kParameters, Message::Form::kBits},
    {"gradient norm", 8, Message::Form::kSum},
    {"sums", 16, Message::Form::kGather},
    {"end of a step", 32, Message::Form::kGather},
};

comm::Batch direct(const Message& message, int ranks) {
  comm::Batch batch;
  batch.label.unit = message.what;
  if (message.form == Message::Form::kSum) {
    batch.ops.emplace_back(comm::AllReduce{at::zeros({message.bytes / 8}, at::kDouble)});
  } else {
    batch.ops.emplace_back(comm::AllGather{at::zeros({message.bytes * ranks}, at::kByte)});
  }
  return batch;
}

void send_relayed(comm::Group& group, const Message& message) {
  switch (message.form) {
    case Message::Form::kGather:
      comm::all_gather_fixed(group, std::string(static_cast<std::size_t>(message.bytes), 'x'),
                             message.what);
      break;
    case Message::Form::kBits:
      comm::any_of_ranks(group, std::vector<bool>(static_cast<std::size_t>(message.bytes)),
                         message.what);
      break;
    case Message::Form::kCounts:
      comm::sum_of_ranks(group,
                         std::vector<std::int64_t>(static_cast<std::size_t>(message.bytes / 8)),
                         message.what);
      break;
    case Message::Form::kHashes:
      comm::all_agree(group,
                      std::vector<std::uint64_t>(static_cast<std::size_t>(message.bytes / 8)),
                      message.what);
      break;
    case Message::Form::kSum:
      comm::all_reduce(group, at::zeros({message.bytes / 8}, at::kDouble), message.what);
      break;
  }
}

std::int64_t relayed_bytes(const Message& message, int ranks) {
  if (message.form == Message::Form::kBits) {
    return comm::relay::rounds(ranks) * ((message.bytes + 7) / 8);
  }
  if (message.form == Message::Form::kHashes || message.form == Message::Form::kCounts) {
    return comm::relay::rounds(ranks) * 2 * message.bytes;
  }
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(ranks), message.bytes);
  return comm::relay::gathered_bytes_sent(lengths, 0);
}

struct Sent {
  std::int64_t messages = 0;
  std::int64_t bytes = 0;
};

Sent sent_in_a_step(bool relayed, int ranks) {
  Sent sent;
  for (const Message& message : kStep) {
    sent.messages += relayed ? comm::relay::rounds(ranks) : ranks - 1;
    sent.bytes += relayed ? relayed_bytes(message, ranks) : (ranks - 1) * message.bytes;
  }
  return sent;
}

std::int64_t open_sockets() {
  std::int64_t count = 0;
  for (const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(one.path(), gone).string();
    if (target.starts_with("socket:")) ++count;
  }
  return count;
}

double median_ms(std::vector<double> all) {
  std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2),
                   all.end());
  return all[all.size() / 2];
}

void print(int ranks, const char* how, Sent sent, const std::string& sockets, double ms,
           const std::string& store) {
  std::printf("| %d | %s | %lld | %lld | %s | %.2f | %s |\n", ranks, how,
              static_cast<long long>(sent.messages), static_cast<long long>(sent.bytes),
              sockets.c_str(), ms, store.c_str());
  std::fflush(stdout);
}

void measure(World& world, int steps) {
  at::set_num_threads(1);
  std::vector<int> everyone;
  for (int rank = 0; rank < world.size(); ++rank) everyone.push_back(rank);
  comm::barrier(world.control(), "connect");
  for (const bool relayed : {true, false}) {
    const auto before = open_sockets();
    const auto group = world.group(everyone, relayed ? "bench control" : "bench direct");
    std::vector<double> times;
    for (int step = -5; step < steps; ++step) {
      comm::barrier(world.control(), "line up");
      const auto begin = Clock::now();
      for (const Message& message : kStep) {
        if (relayed) {
          send_relayed(*group, message);
        } else {
          group->issue(direct(message, world.size()))->wait();
        }
      }
      const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
      if (step >= 0) times.push_back(time.count());
    }
    if (world.rank() != 0) continue;
    print(world.size(), relayed ? "relayed" : "direct", sent_in_a_step(relayed, world.size()),
          std::to_string(open_sockets() - before), median_ms(times), "");
  }
}

// What a message costs each of its two ranks, and how long it is on its way.
constexpr double kHandledUs = 10;
constexpr double kOnItsWayUs = 30;

/// Of one message from everyone to everyone, in microseconds: ranks that begin together.
double simulated_us(bool relayed, int ranks) {
  if (!relayed) return 2 * (ranks - 1) * kHandledUs + kOnItsWayUs;
  std::vector<double> done(static_cast<std::size_t>(ranks), 0.0);
  for (int round = 0; round < comm::relay::rounds(ranks); ++round) {
    const auto before = done;
    for (int rank = 0; rank < ranks; ++rank) {
      const int from = comm::relay::round_of(round, rank, ranks).from;
      const double sent = before[static_cast<std::size_t>(rank)] + kHandledUs;
      const double arrives = before[static_cast<std::size_t>(from)] + kHandledUs + kOnItsWayUs;
      done[static_cast<std::size_t>(rank)] = std::max(sent, arrives) + kHandledUs;
    }
  }
  return *std::max_element(done.begin(), done.end());
}

void simulate(int ranks) {
  constexpr double kSeconds = 60;
  comm::SimulatedWatch watch(ranks, std::chrono::microseconds(100));
  if (watch.run(kSeconds)) std::abort();
  const double a_second = static_cast<double>(watch.store.requests()) / kSeconds;
  for (const bool relayed : {true, false}) {
    const double us = static_cast<double>(std::size(kStep)) * simulated_us(relayed, ranks);
    const auto sockets =
        relayed ? comm::relay::partners(0, ranks).size() : static_cast<std::size_t>(ranks) - 1;
    print(ranks, relayed ? "relayed, simulated" : "direct, simulated",
          sent_in_a_step(relayed, ranks), std::to_string(sockets), us / 1000,
          tessera::concat(static_cast<int>(a_second), " (", static_cast<int>(a_second / ranks * 10),
                          "/10 a rank)"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() > 1 && words[0] == "--simulate") {
    for (std::size_t i = 1; i < words.size(); ++i) simulate(std::stoi(words[i]));
    return 0;
  }
  if ((words.size() != 2 && words.size() != 4) || words[0] != "--ranks" ||
      (words.size() == 4 && words[2] != "--steps")) {
    std::fprintf(stderr, "control_plane: expected --ranks N [--steps S], or --simulate N...\n");
    return 2;
  }
  const int steps = words.size() == 4 ? std::stoi(words[3]) : 50;
  return tessera::launch(std::stoi(words[1]), [&](World& world) { measure(world, steps); });
}
