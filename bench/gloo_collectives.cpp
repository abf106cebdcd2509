// Our collectives over Gloo compared with c10d's own, between two processes on this host.
//
//   gloo_collectives [ROUNDS]
//
// Prints a table: microseconds a call (median, and the fastest), by size of the full buffer in
// fp32. Both are issued and waited for one at a time; alternating rounds, so that other load hits
// both.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/queue.h"
#include "plain_gloo.h"
#include "tessera/world.h"

namespace {

using tessera::World;
namespace comm = tessera::comm;

struct Times {
  std::vector<double> us;
  double median() {
    std::nth_element(us.begin(), us.begin() + static_cast<std::ptrdiff_t>(us.size() / 2), us.end());
    return us[us.size() / 2];
  }
  double fastest() const { return *std::min_element(us.begin(), us.end()); }
};

template <class F>
void timed(Times& times, F&& act) {
  const auto start = std::chrono::steady_clock::now();
  act();
  times.us.push_back(
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
}

comm::Batch batch(comm::Kind kind, comm::Op op) {
  comm::Batch one;
  one.label.kind = kind;
  one.label.unit = "bench";
  one.ops.push_back(std::move(op));
  return one;
}

void run(World& world, int rounds) {
  at::set_num_threads(1);
  const std::vector<int> ranks = {0, 1};
  const auto gather = world.group(ranks, "gather");
  const auto reduce = world.group(ranks, "reduce");
  const auto gloo = bench::plain_gloo(world);
  if (world.rank() == 0) {
    std::printf("%10s | %21s %21s %21s | %21s %21s | %21s %21s\n", "bytes", "all_gather",
                "by the queue", "c10d", "reduce_scatter", "c10d", "all_reduce", "c10d");
  }
  for (const std::int64_t bytes : {16L << 10, 64L << 10, 1L << 20, 16L << 20}) {
    const std::int64_t numel = bytes / 4;
    const std::int64_t slice = numel / world.size();
    auto buffer = at::ones({numel});
    auto mine = buffer.narrow(0, slice * world.rank(), slice);
    auto input = at::ones({numel});
    auto output = at::zeros({slice});
    Times ours_gather, queue_gather, their_gather, ours_reduce, their_reduce, ours_sum, their_sum;
    const int count = bytes > (1 << 20) ? rounds / 10 : rounds;
    for (int round = 0; round < count; ++round) {
      timed(ours_gather,
            [&] { gather->issue(batch(comm::Kind::kAllGather, comm::AllGather{buffer}))->wait(); });
      timed(their_gather, [&] { gloo->_allgather_base(buffer, mine)->wait(); });
      timed(ours_reduce, [&] {
        reduce->issue(batch(comm::Kind::kReduceScatter, comm::ReduceScatter{input, output}))
            ->wait();
      });
      timed(their_reduce, [&] { gloo->_reduce_scatter_base(output, input)->wait(); });
      timed(ours_sum,
            [&] { reduce->issue(batch(comm::Kind::kAllReduce, comm::AllReduce{input}))->wait(); });
      input.fill_(1);
      timed(their_sum, [&] {
        std::vector<at::Tensor> tensors = {input};
        gloo->allreduce(tensors)->wait();
      });
      input.fill_(1);
    }
    for (int round = 0; round < count; ++round) {
      comm::barrier(world.control(), "line up");
      timed(queue_gather, [&] {
        world.queue()
            .submit(*gather, batch(comm::Kind::kAllGather, comm::AllGather{buffer}))
            .wait();
      });
    }
    if (world.rank() != 0) continue;
    std::printf("%10lld |", static_cast<long long>(bytes));
    for (Times* times : {&ours_gather, &queue_gather, &their_gather, &ours_reduce, &their_reduce,
                         &ours_sum, &their_sum}) {
      std::printf(" %9.0f (min %6.0f)%s", times->median(), times->fastest(),
                  times == &their_gather || times == &their_reduce ? " |" : "");
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(20, std::atoi(argv[1])) : 300;
  return tessera::launch(2, [&](World& world) { run(world, rounds); });
}
