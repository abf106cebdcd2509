// A program that world_ends_test.cpp runs: one rank of two over a store that it has opened itself,
// as a program in another language has.
//
//   store_rank STORE RANK MODE, where STORE is "tcp:PORT" (rank 0 serves it) or the path of a file
//
// It prints what its calls have thrown, and how long they took. Unless a mode says otherwise a lost
// rank ends a call.
#include <ATen/ATen.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/batch.h"
#include "comm/group.h"
#include "comm/queue.h"
#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/interrupt.h"
#include "tessera/world.h"

namespace {

using tessera::World;
using Clock = std::chrono::steady_clock;
namespace comm = tessera::comm;

constexpr int kRanks = 2;

struct Rank {
  c10::intrusive_ptr<c10d::Store> store;
  int number = 0;
  std::string mode;
  tessera::WorldOptions options;

  std::shared_ptr<World> connect() const {
    return World::from_store(store, number, kRanks, options);
  }
};

c10::intrusive_ptr<c10d::Store> open(const std::string& where, int rank) {
  if (!where.starts_with("tcp:")) return c10::make_intrusive<c10d::FileStore>(where, kRanks);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::atoi(where.substr(4).c_str()));
  options.isServer = rank == 0;
  options.numWorkers = kRanks;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// The exception of the host program's own check, which is no error of the library.
struct Interrupt : std::runtime_error {
  Interrupt() : std::runtime_error("interrupted by the program") {}
};

void say(const std::string& line) { std::cout << line << std::endl; }

/// Says what it throws, and after how many milliseconds.
void told(const std::function<void()>& call) {
  const auto begin = Clock::now();
  const auto time = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  };
  try {
    call();
    say("threw nothing");
  } catch (const Interrupt& error) {
    say(tessera::concat("threw Interrupt after ", time(), " ms: ", error.what()));
  } catch (const tessera::Error& error) {
    say(tessera::concat("threw ", to_string(error.kind()), " after ", time(),
                        " ms: ", error.what()));
  }
}

void barrier(World& world) { comm::barrier(world.control(), "the test's barrier"); }

void require_sum(World& world) {
  const auto sum = at::full({3}, world.rank() + 1.0);
  world.group().all_reduce(sum);
  TESSERA_INVARIANT(sum.equal(at::full({3}, 3.0)), "wrong sum");
}

/// Twice over one store, then two at the same time.
void close_worlds(const Rank& rank) {
  for (int turn = 0; turn < 2; ++turn) {
    const auto world = rank.connect();
    const auto held = world->group();
    require_sum(*world);
    world->close();
    world->close();
    world->close_failed("it is closed already");
    TESSERA_INVARIANT(world->closed() && !world->aborted(), "found a World that is not closed");
    told([&] { held.barrier("late"); });
    told([&] { world->group(); });
    told([&] { world->recover(); });
  }
  const auto one = rank.connect();
  const auto other = rank.connect();
  require_sum(*other);
  require_sum(*one);
  other->close();
  require_sum(*one);
  one->close();
}

void fail_one(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 1) {
    told([&] { world->close_failed("ValueError: boom"); });
    return;
  }
  told([&] { barrier(*world); });
  // It knows of the failure, so it is not ended later.
  std::this_thread::sleep_for(rank.options.grace_period + std::chrono::milliseconds(700));
  told([&] { world->recover(); });
  told([&] { world->close(); });
}

/// Rank 0 makes no call any more.
void fail_while_the_other_computes(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 1) return world->close_failed("ValueError: boom");
  for (;;) ::pause();
}

void fail_while_the_other_closes(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 0) return told([&] { world->close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  world->close_failed("ValueError: boom");
}

void lose_one(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 1) ::kill(::getpid(), SIGKILL);
  told([&] { barrier(*world); });
  world->close_failed("as an uncaught exception does");
}

/// Rank 0's check begins to throw while it waits.
void interrupt_one(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 1) {
    while (!world->aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    told([&] { barrier(*world); });
  } else {
    std::atomic<std::int64_t> since{0};
    const auto now = [] { return Clock::now().time_since_epoch().count(); };
    tessera::set_interrupt_check([&] {
      if (since != 0) throw Interrupt();
    });
    std::thread signal([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(350));
      since = now();
    });
    told([&] { require_sum(*world); });
    const auto late = std::chrono::duration_cast<std::chrono::milliseconds>(
        Clock::duration(now() - since.load()));
    say(tessera::concat("left ", late.count(), " ms late"));
    signal.join();
    tessera::set_interrupt_check({});
  }
  world->recover();
  require_sum(*world);
  say("recovered");
  world->close();
}

/// Rank 1 is done, and rank 0 has one more call.
void leave_one(const Rank& rank) {
  const auto world = rank.connect();
  barrier(*world);
  if (rank.number == 1) return told([&] { world->close(); });
  told([&] { barrier(*world); });
}

void fork_one(const Rank& rank) {
  auto world = rank.connect();
  auto held = std::make_unique<tessera::Group>(world->group());
  require_sum(*world);
  comm::Batch batch;
  batch.label.kind = comm::Kind::kAllReduce;
  batch.label.unit = "under way at the fork";
  batch.ops.push_back(comm::Combine{at::zeros({1}, at::kByte)});
  std::atomic<bool> forked{rank.number != 0};
  comm::Pending pending = world->queue().submit(world->control(), std::move(batch), [&] {
    while (!forked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  if (rank.number == 0) {
    std::cout.flush();
    const pid_t child = ::fork();
    if (child == 0) {
      told([&] { pending.wait(); });
      told([&] { held->barrier("child"); });
      told([&] { world->group(); });
      world->abort("child");
      world->close_failed("child");
      world->close();
      held.reset();
      world.reset();
      say("child is done");
      ::_exit(0);
    }
    forked = true;
    int status = 0;
    ::waitpid(child, &status, 0);
    say(tessera::concat("child ended by ", status));
  }
  pending.wait();
  for (int turn = 0; turn < 3; ++turn) require_sum(*world);
  world->close();
}

void run(const Rank& rank) {
  const std::string& mode = rank.mode;
  if (mode == "close") close_worlds(rank);
  if (mode == "fail" || mode == "fail-process") fail_one(rank);
  if (mode == "grace") fail_while_the_other_computes(rank);
  if (mode == "fail-closing") fail_while_the_other_closes(rank);
  if (mode == "kill") lose_one(rank);
  if (mode == "interrupt") interrupt_one(rank);
  if (mode == "leave") leave_one(rank);
  if (mode == "fork") fork_one(rank);
  say("done");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  Rank rank;
  rank.number = std::atoi(argv[2]);
  rank.mode = argv[3];
  rank.options.init_timeout = std::chrono::seconds(60);
  rank.options.grace_period = std::chrono::milliseconds(500);
  const bool ends_process = rank.mode == "fail-process";
  if (!ends_process) rank.options.lost_rank_ends = tessera::LostRankEnds::kCall;
  try {
    rank.store = open(argv[1], rank.number);
    run(rank);
  } catch (const std::exception& error) {
    std::cerr << "uncaught: " << error.what() << std::endl;
    return 3;
  }
  return 0;
}
