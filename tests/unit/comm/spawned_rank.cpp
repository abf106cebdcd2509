// A program that process_test.cpp runs: its ranks exchange sums, and one of them fails as the
// arguments say.
//
//   spawned_rank NPROC MODE RANK STEP STEPS TIMEOUT_MS
//   MODE: none | throw | usage | kill | stall | exit | stop | disagree | cross | abort | withhold
//         alone: gives up after TIMEOUT_MS where no process serves the store
//         apart: RANK is in no group, and stops
//         unwind: aborts its World, and says half a second later why
//         user-none | user-operation | user-shape | user-dtype | user-order | user-refused |
//         user-absent: what RANK calls of a user's collectives, while the others call all_reduce
//         caught: ranks call drawn programs of which one differs, seeded with STEP, and catch that;
//         caught-leave: they leave then, without a recovery
//         caught-kill: RANK is killed then, as the others begin to recover
//         caught-stall: they recover, and RANK makes no call any more from STEP on
//         apart-uncaught: RANK comes to no call while the others disagree, and catch that;
//         apart-unwaited: it has submitted a collective, and does not wait for it
//         late: all but RANK come to a collective, at moments drawn with STEP;
//         too-late: the one after RANK comes when the timeout of 1 s of the others is just over
//         p2p-MODE: RANK does MODE (none, throw, kill, stall, stop, poison; shape, swap: sends what
//         its neighbour does not expect) while stages hand messages on
//         work-slow | work-endless | work-kill | work-stop: of RANK, before the first step
#include <ATen/ATen.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "comm/p2p.h"
#include "comm/queue.h"
#include "dist/drawn_calls.h"
#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/world.h"

namespace {

using tessera::World;
namespace comm = tessera::comm;

struct Plan {
  int nproc;
  std::string mode;
  int rank;
  int step;
  int steps;
};

/// A rank that lives, and comes to nothing any more.
[[noreturn]] void stall() {
  for (;;) ::pause();
}

void misbehave(const Plan& plan, World& world) {
  if (plan.mode == "throw") throw std::runtime_error("rank fails on purpose");
  if (plan.mode == "usage") {
    throw tessera::Error(tessera::ErrorKind::kUsage, "rank asks for the impossible");
  }
  if (plan.mode == "kill") ::kill(::getpid(), SIGKILL);
  if (plan.mode == "stop") ::kill(::getpid(), SIGSTOP);
  if (plan.mode == "exit") ::_exit(7);
  if (plan.mode == "stall") stall();
  if (plan.mode == "disagree") {
    comm::barrier(world.control(), "something else");
  }
  if (plan.mode == "abort") world.abort("a step went wrong");
  if (plan.mode == "unwind") {
    world.abort("an exception left the forward");
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    throw std::runtime_error("rank fails on purpose");
  }
}

/// The rank of the plan withholds a message from its successor; the others wait for nothing and
/// continue, for longer than the successor waits.
void withhold(const Plan& plan, World& world, comm::Group& group) {
  const int debtor = plan.rank;
  const int creditor = (debtor + 1) % world.size();
  if (world.rank() == debtor) stall();
  comm::AllToAll transfer;
  transfer.input = at::zeros({0});
  transfer.output = at::zeros({world.rank() == creditor ? 1 : 0});
  transfer.sends.resize(static_cast<std::size_t>(world.size()));
  transfer.receives.resize(static_cast<std::size_t>(world.size()));
  if (world.rank() == creditor) transfer.receives[static_cast<std::size_t>(debtor)] = 1;
  comm::Batch batch;
  batch.ops.emplace_back(std::move(transfer));
  world.queue().submit(group, std::move(batch)).wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  comm::all_gather_bytes(group, "anything", "what comes after");
}

/// The rank of the plan shares no group with the others, of which one waits for one that computes.
void stop_outside_of_groups(const Plan& plan, World& world) {
  if (world.rank() == plan.rank) ::kill(::getpid(), SIGSTOP);
  std::vector<int> others;
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank != plan.rank) others.push_back(rank);
  }
  const auto group = world.group(others, "gather");
  if (world.rank() == others.back()) stall();
  comm::all_gather_bytes(*group, "anything", "what never comes");
}

/// The rank of the plan has something to do that the others wait for.
void prepare(const Plan& plan, World& world, std::chrono::milliseconds timeout) {
  world.begin_start_up();
  // Ranks wait in their first group, or for it.
  if (plan.step > 0) comm::barrier(world.control(), "opened");
  if (world.rank() == plan.rank) {
    world.work_at("hashing the data");
    if (plan.mode == "work-slow") std::this_thread::sleep_for(2 * timeout);
    if (plan.mode == "work-endless") stall();
    if (plan.mode == "work-kill") ::kill(::getpid(), SIGKILL);
    if (plan.mode == "work-stop") ::kill(::getpid(), SIGSTOP);
    world.work_at("");
  }
  comm::barrier(world.control(), "hash of the data");
  world.end_start_up();
}

/// Every call of a user's, against what it means over ranks 0, 1, ...
void check_calls(World& world) {
  const auto group = world.group();
  const int size = world.size();
  const auto mine = at::full({3}, world.rank() + 0.5);
  auto sum = mine.clone();
  group.all_reduce(sum);
  auto largest = mine.clone();
  group.all_reduce(largest, tessera::ReduceOp::kMax);
  auto last = mine.clone();
  group.broadcast(last, size - 1);
  const auto all = group.all_gather(mine);
  TESSERA_INVARIANT(sum.equal(at::full({3}, size * (size - 1) / 2 + 0.5 * size)), "wrong sum");
  TESSERA_INVARIANT(largest.equal(at::full({3}, size - 0.5)), "wrong maximum");
  TESSERA_INVARIANT(last.equal(all.back()) && last.equal(largest), "wrong broadcast");
  TESSERA_INVARIANT(group.mean(mine).equal(sum / size), "wrong mean");
  TESSERA_INVARIANT(group.mean(world.rank() + 1.0) == (size + 1) / 2.0, "wrong mean");
}

/// The rank of the plan calls something else than the others.
void call_as_a_user(const Plan& plan, World& world) {
  check_calls(world);
  const auto group = world.group();
  const auto sum = [&](const at::Tensor& x) {
    group.all_reduce(x, tessera::ReduceOp::kSum, "loss");
  };
  const std::string what = world.rank() == plan.rank ? plan.mode.substr(5) : "none";
  if (what == "operation") group.broadcast(at::ones({2, 3}), 0, "loss");
  if (what == "shape") sum(at::ones({3, 2}));
  if (what == "dtype") sum(at::ones({2, 3}, at::kInt));
  if (what == "refused") sum(at::ones({2, 3}).t());
  if (what == "order") group.barrier("end");
  if (what == "absent") stall();
  sum(at::ones({2, 3}));
  group.barrier("end");
}

void catch_disagreement(World& world) {
  const auto told =
      tessera::test::told_by(world, world.group(), {{.sizes = {world.rank() == 0 ? 2 : 3}}});
  TESSERA_INVARIANT(told.find("ranks disagree") != std::string::npos, "found '", told, "'");
}

void catch_and_leave(World& world) {
  catch_disagreement(world);
  // The later ones need the store yet.
  std::this_thread::sleep_for(std::chrono::milliseconds(300 * world.rank()));
}

void catch_and_lose_one(const Plan& plan, World& world) {
  catch_disagreement(world);
  if (world.rank() == plan.rank) ::kill(::getpid(), SIGKILL);
  world.recover();
}

/// Ranks 0 and 1 disagree; 2 and 3 are the other pair.
void catch_without_one_rank(const Plan& plan, World& world) {
  const auto pair = world.mesh(tessera::MeshShape::dense(1, 2, 2, 1, 1)).group("dp_shard");
  world.group().barrier("begin");
  const bool is_of_other_pair = world.rank() / 2 == plan.rank / 2;
  comm::Batch batch;
  batch.ops.emplace_back(comm::AllGather{at::zeros({2})});
  if (world.rank() == plan.rank) {
    if (plan.mode == "apart-unwaited") {
      world.queue().submit(*world.group(pair.ranks(), "user"), std::move(batch));
    }
    stall();
  }
  try {
    // It connects to its peer, which does not come, until the World is aborted.
    while (is_of_other_pair && !world.aborted()) ::usleep(10000);
    pair.all_reduce(at::ones({1 + world.rank()}));
  } catch (const tessera::Error&) {
    world.recover();
  }
}

/// Whose time is up has closed its connections while others still wait for it.
void come_late(const Plan& plan, World& world) {
  comm::barrier(world.control(), "begin");
  if (world.rank() == plan.rank) stall();
  tessera::test::DrawnCalls draw(static_cast<unsigned>(plan.step));
  int moment = 0;
  for (int rank = 0; rank <= world.rank(); ++rank) moment = draw.below(16) * 100;
  if (plan.mode == "too-late") moment = world.rank() == (plan.rank + 1) % world.size() ? 1050 : 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(moment));
  comm::all_gather_bytes(world.control(), "anything", "what comes late");
}

void gather_layers(World& world, comm::Group& group) {
  comm::Batch batch;
  batch.label.kind = comm::Kind::kAllGather;
  batch.label.unit = "layers";
  batch.ops.emplace_back(comm::AllGather{at::zeros({30000L * world.size()})});
  world.queue().submit(group, std::move(batch)).wait();
}

/// One step of a pipeline whose ranks are its stages: activations go up, gradients back, in two
/// micro-batches. `wrong`: what the plan's rank does.
void hand_on(World& world, comm::P2P& p2p, int step, const std::string& wrong) {
  const int rank = world.rank();
  const int last = world.size() - 1;
  std::vector<std::unique_ptr<comm::Transfer>> sends;
  const auto tag = [&](comm::P2PTag::Direction direction, int stage, int micro_batch) {
    return comm::P2PTag{static_cast<std::uint64_t>(step), direction, stage, micro_batch, 0};
  };
  // Takes one message from one neighbour and hands it on to the other one, or turns it.
  const auto pass = [&](comm::P2PTag::Direction direction, int micro_batch) {
    const int ahead = direction == comm::P2PTag::Direction::kForward ? 1 : -1;
    auto x = at::full({30000}, 10 * step + micro_batch, at::kLong);
    const int from = rank - ahead;
    const int to = rank + ahead;
    if (from >= 0 && from <= last) {
      x.fill_(-1);
      p2p.receive(from, tag(direction, from, micro_batch), x)->wait();
    }
    TESSERA_INVARIANT(x.eq(10 * step + micro_batch).all().item<bool>(), "wrong message");
    if (to < 0 || to > last) return;
    if (wrong == "shape") x = x.view({2, 15000});
    const int named = wrong == "swap" ? micro_batch + 5 : micro_batch;
    sends.push_back(p2p.send(to, tag(direction, rank, named), x));
  };
  for (const int micro_batch : {0, 1}) pass(comm::P2PTag::Direction::kForward, micro_batch);
  for (const int micro_batch : {0, 1}) pass(comm::P2PTag::Direction::kBackward, micro_batch);
  for (const auto& send : sends) send->wait();
}

void train_a_pipeline(const Plan& plan, World& world) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  const auto p2p = comm::p2p_of(world, all);
  Plan wrong = plan;
  wrong.mode = plan.mode.substr(4);
  for (int step = 0; step < plan.steps; ++step) {
    const bool fails = step == plan.step && world.rank() == plan.rank;
    try {
      if (fails) misbehave(wrong, world);
      hand_on(world, *p2p, step, fails ? wrong.mode : "none");
    } catch (const tessera::Error&) {
      if (wrong.mode != "poison" || !world.aborted()) throw;
      world.recover();
    }
  }
  std::cout << "done " << world.rank() << std::endl;
}

void train(const Plan& plan, World& world) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  const auto group = world.group(all, "gather");
  for (int step = 0; step < plan.steps; ++step) {
    const bool fails = step == plan.step && world.rank() == plan.rank;
    if (fails) misbehave(plan, world);
    if (fails && plan.mode == "cross") gather_layers(world, *group);  // before the sum, not after
    if (step == plan.step && plan.mode == "withhold") withhold(plan, world, *group);
    try {
      auto sum = at::full({4}, world.rank(), at::kLong);
      comm::all_reduce(world.control(), sum, "sum");
      gather_layers(world, *group);
      const std::int64_t expected = world.size() * (world.size() - 1) / 2;
      TESSERA_INVARIANT(sum[0].item<std::int64_t>() == expected || fails, "wrong sum");
    } catch (const tessera::Error& error) {
      if (plan.mode != "abort" || !world.aborted()) throw;
      const auto failed = world.recoveries();
      world.recover();
      world.abort_epoch(failed, "too late");
      TESSERA_INVARIANT(!world.aborted(), "aborted by what an earlier epoch has found");
    }
  }
  std::cout << "done " << world.rank() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 64;
  const Plan plan{std::atoi(argv[1]), argv[2], std::atoi(argv[3]), std::atoi(argv[4]),
                  std::atoi(argv[5])};
  tessera::WorldOptions options;
  options.timeout = std::chrono::milliseconds(std::atoi(argv[6]));
  if (plan.mode.starts_with("caught") || plan.mode.starts_with("apart-")) {
    options.blocked_after = std::chrono::milliseconds(100);
  }
  options.init_timeout = std::chrono::seconds(plan.mode == "work-endless" ? 10 : 60);
  if (plan.mode == "alone") options.init_timeout = options.timeout;
  const auto body = [&](World& world) {
    std::cout << "begun " << world.rank() << '\n';  // it stays in the buffer
    if (plan.mode.starts_with("work-")) prepare(plan, world, options.timeout);
    if (plan.mode == "apart") stop_outside_of_groups(plan, world);
    if (plan.mode.starts_with("user-")) call_as_a_user(plan, world);
    if (plan.mode == "caught-leave") return catch_and_leave(world);
    if (plan.mode == "caught-kill") return catch_and_lose_one(plan, world);
    if (plan.mode == "caught-stall") {
      catch_disagreement(world);
      world.recover();
      return train({plan.nproc, "stall", plan.rank, plan.step, plan.steps}, world);
    }
    if (plan.mode.starts_with("apart-")) return catch_without_one_rank(plan, world);
    if (plan.mode == "late" || plan.mode == "too-late") return come_late(plan, world);
    if (plan.mode == "caught") {
      tessera::test::catch_disagreements(world, static_cast<unsigned>(plan.step), plan.steps,
                                         check_calls);
      return train({plan.nproc, "none", 0, 0, 3}, world);
    }
    plan.mode.starts_with("p2p-") ? train_a_pipeline(plan, world) : train(plan, world);
  };
  return tessera::launch(plan.nproc, body, options);
}
