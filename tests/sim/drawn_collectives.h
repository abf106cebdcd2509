// Programs of collectives that ranks draw alike, with values that each draws for itself.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/queue.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "tessera/world.h"

namespace tessera::sim {

using Tensors = std::vector<at::Tensor>;

inline comm::Kind kind_of(const comm::Op& op) {
  return std::visit([](const auto& one) { return one.facts().kind; }, op);
}

inline comm::Batch batch_of(std::vector<comm::Op> ops, const std::string& unit = "unit") {
  comm::Batch batch;
  batch.label.unit = unit;
  batch.label.kind = ops.size() == 1 ? kind_of(ops.front()) : comm::Kind::kBatch;
  batch.ops = std::move(ops);
  return batch;
}

/// Draws that are the same on all ranks of a program, and draws of each rank.
class Draws {
 public:
  Draws(std::uint64_t seed, const World& world)
      : alike_(seed),
        own_(at::make_generator<at::CPUGeneratorImpl>(seed * 64 +
                                                      static_cast<std::uint64_t>(world.rank()))),
        device_(world.device()) {}

  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(alike_() % static_cast<std::uint64_t>(end));
  }
  /// Made on the current stream: nothing waits for it, as for an upload something would.
  at::Tensor tensor(std::int64_t numel, at::ScalarType dtype) {
    const at::Tensor values = at::isIntegralType(dtype, false)
                                  ? at::randint(0, 50, {numel}, own_)
                                  : at::randn({numel}, own_, at::TensorOptions(at::kDouble));
    return values.to(dtype).to(device_).mul(1);
  }

 private:
  std::mt19937_64 alike_;
  at::Generator own_;
  at::Device device_;
};

inline constexpr std::int64_t kSlices[] = {0, 1, 7, 64, 1000, 40000};
inline constexpr at::ScalarType kCarried[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kLong};
struct Sum {
  at::ScalarType wire, result;
};
inline constexpr Sum kSums[] = {{at::kFloat, at::kFloat},       {at::kBFloat16, at::kFloat},
                                {at::kHalf, at::kFloat},        {at::kFloat, at::kDouble},
                                {at::kBFloat16, at::kBFloat16}, {at::kLong, at::kLong}};

/// A drawn operation among the ranks, and where its result will be.
inline std::pair<comm::Op, at::Tensor> drawn(Draws& draws, const comm::Group& group) {
  const auto pick = [&](const auto& from) {
    return from[static_cast<std::size_t>(draws.below(static_cast<std::int64_t>(std::size(from))))];
  };
  const int ranks = group.size();
  const std::int64_t slice = pick(kSlices);
  switch (draws.below(5)) {
    case 0: {
      const at::Tensor buffer = draws.tensor(slice * ranks, pick(kCarried));
      return {comm::AllGather{buffer}, buffer};
    }
    case 1: {
      const Sum sum = pick(kSums);
      const at::Tensor output = draws.tensor(slice, sum.result);
      const auto into = draws.below(2) == 0 ? comm::Into::kAdd : comm::Into::kOverwrite;
      return {comm::ReduceScatter{draws.tensor(slice * ranks, sum.wire), output, into}, output};
    }
    case 2: {
      const Sum sum = pick(kSums);
      const at::Tensor data = draws.tensor(slice, sum.wire);
      if (sum.wire == sum.result && draws.below(2) == 0) return {comm::AllReduce{data}, data};
      const at::Tensor output = draws.tensor(slice, sum.result);
      return {comm::AllReduce{data, output}, output};
    }
    case 3: {
      const at::Tensor data = draws.tensor(slice, pick(kCarried));
      return {comm::Broadcast{data, static_cast<int>(draws.below(ranks))}, data};
    }
    default: {
      // counts[s][r]: what s sends to r.
      std::vector<std::vector<std::int64_t>> counts;
      for (int s = 0; s < ranks; ++s) {
        counts.emplace_back();
        for (int r = 0; r < ranks; ++r) counts.back().push_back(draws.below(slice + 1));
      }
      const auto self = static_cast<std::size_t>(group.rank());
      const auto& sends = counts[self];
      std::vector<std::int64_t> receives;
      for (const auto& of_sender : counts) receives.push_back(of_sender[self]);
      const auto sum = [](const auto& all) {
        return std::accumulate(all.begin(), all.end(), std::int64_t{0});
      };
      const at::ScalarType dtype = pick(kCarried);
      const at::Tensor output = draws.tensor(sum(receives), dtype);
      return {comm::AllToAll{draws.tensor(sum(sends), dtype), sends, output, receives}, output};
    }
  }
}

/// Batches of one to three drawn operations on two groups, some of them under way at once, by the
/// queue or without; results are read, and memory is let go, as soon as each was waited for.
inline Tensors program(World& world, std::uint64_t seed) {
  Draws draws(seed, world);
  const auto everyone = comm::all_ranks(world.size());
  const std::shared_ptr<comm::Group> groups[] = {world.group(everyone, "gather"),
                                                 world.group(everyone, "reduce")};
  struct UnderWay {
    std::function<void()> wait;
    Tensors results;
  };
  std::deque<UnderWay> under_way;
  Tensors read;
  const auto finish_oldest = [&] {
    under_way.front().wait();
    for (const at::Tensor& result : under_way.front().results) read.push_back(result.mul(1));
    under_way.pop_front();
  };
  for (int i = 0; i < 12; ++i) {
    const auto& group = groups[draws.below(2)];
    std::vector<comm::Op> ops;
    UnderWay next;
    for (std::int64_t n = draws.below(3); n >= 0; --n) {
      auto [op, result] = drawn(draws, *group);
      ops.push_back(std::move(op));
      next.results.push_back(result);
    }
    // A group of the CPU is issued to from the queue's thread alone.
    if (draws.below(2) == 0 || world.device().is_cpu()) {
      auto pending = world.queue().submit(*group, batch_of(std::move(ops)));
      next.wait = [pending]() mutable { pending.wait(); };
    } else {
      next.wait = [work = std::shared_ptr(group->issue(batch_of(std::move(ops))))] {
        work->wait();
      };
    }
    under_way.push_back(std::move(next));
    if (static_cast<std::int64_t>(under_way.size()) > draws.below(3)) finish_oldest();
  }
  while (!under_way.empty()) finish_oldest();
  return comm::read_on_host(read, "results");
}

/// Returns the results of a program, by rank.
inline std::vector<Tensors> results_of(const Where& where, std::uint64_t seed) {
  std::vector<Tensors> of_ranks(static_cast<std::size_t>(where.ranks));
  on_ranks(where, [&](World& world) {
    of_ranks[static_cast<std::size_t>(world.rank())] = program(world, seed);
  });
  return of_ranks;
}

/// The program's results on devices are those of ranks on the CPU, whose tensors nothing stages.
inline void expect_bits_of_the_cpu(const Where& where, std::uint64_t seed,
                                   const std::vector<Tensors>& expected) {
  const auto found = results_of(where, seed);
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    ASSERT_EQ(found[rank].size(), expected[rank].size());
    for (std::size_t i = 0; i < found[rank].size(); ++i) {
      expect_same_bits(found[rank][i], expected[rank][i],
                       concat(shown(where), ", seed ", seed, ", rank ", rank, ", ", i));
    }
  }
  settle();
}

}  // namespace tessera::sim
