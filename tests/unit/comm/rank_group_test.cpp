// Collectives on a program's own tensors: what they compute, on both backends, and that every misuse
// is an error that names both calls.
#include "tessera/rank_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>

#include "rank_pools.h"
#include "tessera/mesh.h"

namespace tessera::comm::rank_group_test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Rank `rank`'s values: reproducible, spread over magnitudes so that every order of additions has
/// its own rounding; whole numbers for whole dtypes.
at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype, int rank) {
  const auto numel = c10::multiply_integers(sizes);
  const auto places = at::arange(numel, at::kDouble) + 1.0;
  const auto mixed = (places * 12.9898 + (rank + 1) * 78.233).sin() * 43758.5453;
  const auto unit = mixed - mixed.floor() - 0.5;
  if (dtype == at::kBool) return (unit > 0).reshape(sizes);
  const auto spread = unit * at::pow(2.0, (places * 7).fmod(13) - 6);
  return (at::isIntegralType(dtype, false) ? (unit * 100).abs().floor() : spread)
      .to(dtype)
      .reshape(sizes);
}

std::vector<at::Tensor> of_all(int ranks, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(values(sizes, dtype, rank));
  return all;
}

/// By definition: one after the other, in rank order, narrow floats in fp32 and rounded once.
at::Tensor plainly(const std::vector<at::Tensor>& all, ReduceOp op) {
  if (op == ReduceOp::kMax) return at::stack(all).amax(0);
  if (op == ReduceOp::kMin) return at::stack(all).amin(0);
  const auto dtype = all.front().scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum = all.front().to(narrow ? at::kFloat : dtype, /*non_blocking=*/false,
                                  /*copy=*/true);
  for (std::size_t i = 1; i < all.size(); ++i) sum.add_(all[i].to(sum.scalar_type()));
  if (op == ReduceOp::kMean) sum.div_(static_cast<std::int64_t>(all.size()));
  return sum.to(dtype);
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

class RankGroups : public testing::TestWithParam<std::tuple<ThreadBackend, int>> {
 protected:
  ThreadBackend backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  ThreadRanks& threads() const { return pool(backend(), ranks()); }
};

// Relayed and direct, whole and empty, of no axis; 300 KiB is beyond what is relayed.
const std::vector<std::vector<std::int64_t>> kSizes{{}, {0, 3}, {5}, {2, 3}, {80000}};

// Property: every reduction of every dtype has the bits of its definition, on all ranks.
TEST_P(RankGroups, ReductionsAreTheirDefinitions) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte}) {
    for (const auto op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin}) {
      if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
      for (const auto& sizes : kSizes) {
        const auto all = of_all(ranks(), sizes, dtype);
        const auto expected = plainly(all, op);
        threads().run([&](World& world) {
          const auto own = all[static_cast<std::size_t>(world.rank())];
          const auto data = own.clone();
          world.group().all_reduce(data, op, "values");
          EXPECT_TRUE(same(data, expected)) << to_string(op) << " " << dtype << " " << sizes;
          if (op == ReduceOp::kMean) {
            EXPECT_TRUE(same(world.group().mean(own), expected));
          }
        });
      }
    }
  }
}

// Property: a gather stacks, a broadcast copies, whatever the dtype; both leave other tensors alone.
TEST_P(RankGroups, GathersAndBroadcastsCopyEveryBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat}) {
    for (const auto& sizes : kSizes) {
      auto all = of_all(ranks(), sizes, dtype == at::kComplexFloat ? at::kFloat : dtype);
      for (auto& one : all) one = one.to(dtype);
      threads().run([&](World& world) {
        const auto own = all[static_cast<std::size_t>(world.rank())];
        EXPECT_TRUE(same(world.group().all_gather(own), at::stack(all))) << dtype << sizes;
        for (const int from : {0, world.size() - 1}) {
          const auto data = own.clone();
          world.group().broadcast(data, from);
          EXPECT_TRUE(same(data, all[static_cast<std::size_t>(from)])) << dtype << sizes;
        }
      });
    }
  }
}

// Property: strides are a rank's own affair.
TEST_P(RankGroups, TensorsThatAreNotContiguousAreWrittenInPlace) {
  const auto all = of_all(ranks(), {3, 4}, at::kFloat);
  threads().run([&](World& world) {
    const auto own = all[static_cast<std::size_t>(world.rank())];
    const auto columns = [&] {
      auto wide = at::zeros({4, 6});
      auto part = wide.narrow(1, 1, 3).t();  // [3, 4]
      part.copy_(own);
      return std::pair(wide, part);
    };
    for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
      auto [wide, part] = columns();
      world.group().all_reduce(part, op);
      EXPECT_TRUE(same(part.contiguous(), plainly(all, op)));
      EXPECT_EQ(wide.select(1, 0).abs().sum().item<float>(), 0.0F);
    }
    auto [wide, part] = columns();
    world.group().broadcast(part, 0);
    EXPECT_TRUE(same(part.contiguous(), all[0]));
    EXPECT_TRUE(same(world.group().all_gather(part),
                     at::stack(std::vector(static_cast<std::size_t>(world.size()), all[0]))));
  });
}

// Property: a number's mean is formed in fp64; a barrier lets nobody through before the last.
TEST_P(RankGroups, MeansOfNumbersAreExactAndABarrierHolds) {
  std::atomic<int> here{0};
  threads().run([&](World& world) {
    const RankGroup group = world.group();
    const double third = 1.0 / 3.0;
    double sum = 0.0;
    for (int rank = 0; rank < world.size(); ++rank) sum += third + rank;
    EXPECT_EQ(group.mean(third + world.rank(), "loss"), sum / world.size());
    ++here;
    group.barrier("all are here");
    EXPECT_EQ(here, world.size());
  });
}

// Property: autograd takes nothing that was written in place for unchanged.
TEST_P(RankGroups, WhatIsWrittenIsAChangeInPlace) {
  threads().run([](World& world) {
    const RankGroup group = world.group();
    const auto data = at::ones({3});
    const auto before = data._version();
    group.all_reduce(data);
    const auto reduced = data._version();
    EXPECT_GT(reduced, before);
    group.broadcast(data, 0);
    EXPECT_EQ(data._version() > reduced, world.rank() != 0);
    const c10::InferenceMode inference;  // without versions
    const auto other = at::ones({3});
    group.all_reduce(other);
    EXPECT_EQ(other.sum().item<float>(), 3.0F * static_cast<float>(world.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, RankGroups,
                         testing::Combine(testing::Values(ThreadBackend::kInProcess,
                                                          ThreadBackend::kGloo),
                                          testing::Values(1, 2, 3, 5)),
                         [](const auto& each) {
                           return concat(name_of(std::get<0>(each.param)), std::get<1>(each.param));
                         });

// Property: an axis' group is the ranks that differ on it alone, and sums over them alone.
TEST(MeshGroups, AreTheRanksOfAnAxis) {
  pool(ThreadBackend::kInProcess, 4).run([](World& world) {
    const Mesh mesh = world.mesh(MeshShape::dense(1, 2, 2, 1, 1));
    const auto sum_over = [&](const RankGroup& group) {
      const auto mine = at::full({}, 1 << world.rank(), at::kLong);
      group.all_reduce(mine);
      return mine.item<std::int64_t>();
    };
    const bool upper = world.rank() >= 2;
    EXPECT_EQ(sum_over(mesh.group("dp_shard")), upper ? 12 : 3);
    EXPECT_EQ(sum_over(mesh.group("dp_replicate")), world.rank() % 2 == 0 ? 5 : 10);
    EXPECT_EQ(sum_over(mesh.group_over({"dp_replicate", "dp_shard"})), 15);
    EXPECT_EQ(sum_over(mesh.group("tp")), 1 << world.rank());
    EXPECT_THAT(mesh.group("dp_shard").ranks(), upper ? ElementsAre(2, 3) : ElementsAre(0, 1));
    EXPECT_EQ(mesh.group("dp_replicate").rank(), world.rank() / 2);
    try {
      mesh.group("dp_chard");
      ADD_FAILURE() << "an axis that is none was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("dp_chard"));
    }
  });
}

std::string error_of(const std::function<void()>& act, ErrorKind kind) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "no error";
}

// Property: what does not fit is refused on its rank before anything is sent, with what to do.
TEST(RankGroup, TensorsThatDoNotFitAreRefusedByName) {
  pool(ThreadBackend::kInProcess, 1).run([](World& world) {
    const RankGroup group = world.group();
    const auto refused = [](const std::function<void()>& act) {
      return error_of(act, ErrorKind::kUsage);
    };
    const auto floats = at::ones({2, 3});
    EXPECT_THAT(refused([&] { group.all_reduce({}, ReduceOp::kSum, "loss"); }),
                HasSubstr("all_reduce (sum) of loss: found an undefined tensor"));
    EXPECT_THAT(refused([&] { group.all_gather(at::ones({2}).to(at::kMeta)); }),
                AllOf(HasSubstr("found a tensor on meta"), HasSubstr("expected one on the CPU")));
    EXPECT_THAT(refused([&] { group.all_gather(at::ones({2}).to_sparse()); }),
                HasSubstr("found a sparse or quantized tensor"));
    EXPECT_THAT(refused([&] { group.mean(at::ones({2}, at::kLong), "count"); }),
                AllOf(HasSubstr("mean of count, Long [2]"), HasSubstr("floating-point")));
    EXPECT_THAT(refused([&] { group.all_reduce(at::ones({2}, at::kBool)); }),
                AllOf(HasSubstr("Bool"), HasSubstr("cannot be added")));
    EXPECT_THAT(
        refused([&] { group.all_reduce(at::ones({2}, at::kComplexFloat), ReduceOp::kMax); }),
        HasSubstr("has no order"));
    EXPECT_THAT(refused([&] { group.all_reduce(at::ones({1}).expand({4})); }),
                HasSubstr("share memory"));
    EXPECT_THAT(refused([&] { group.broadcast(floats, 1, "table"); }),
                HasSubstr("broadcast of table, Float [2, 3]: found rank 1, expected one of"));
    const auto trained = at::ones({2}).requires_grad_();
    EXPECT_THAT(refused([&] { group.mean(trained * 2, "loss"); }),
                AllOf(HasSubstr("requires grad"), HasSubstr("tensor.detach()")));
    const at::NoGradGuard no_grad;
    group.all_reduce(trained);
  });
}

/// What two ranks that call these get: the same on both.
std::string disagreement(ThreadBackend backend, const std::function<void(const RankGroup&)>& zero,
                         const std::function<void(const RankGroup&)>& one) {
  WorldOptions options;
  options.blocked_after = milliseconds(40);
  options.timeout = std::chrono::seconds(20);
  ThreadRanks ranks(2, backend, options);
  std::atomic<int> told{0};
  const auto error = error_of(
      [&] {
        ranks.run([&](World& world) {
          try {
            (world.rank() == 0 ? zero : one)(world.group());
          } catch (const Error&) {
            ++told;
            throw;
          }
        });
      },
      ErrorKind::kComm);
  EXPECT_EQ(told, 2) << error;
  return error;
}

class Misuse : public testing::TestWithParam<ThreadBackend> {};

// Property: ranks that mean different calls, or tensors, get an error that names both; none waits.
TEST_P(Misuse, IsAnErrorThatNamesBothCalls) {
  using Calls = std::function<void(const RankGroup&)>;
  const auto sum = [](at::Tensor data, std::string what = "") -> Calls {
    return [=](const RankGroup& group) { group.all_reduce(data.clone(), ReduceOp::kSum, what); };
  };
  const auto floats = at::ones({2, 3});
  struct Case {
    Calls zero, one;
    std::string of_zero, of_one;
  };
  const std::vector<Case> cases{
      {sum(floats, "loss"), sum(floats, "accuracy"), "sum of loss, Float [2, 3]",
       "sum of accuracy, Float [2, 3]"},
      {sum(floats), sum(at::ones({3, 2})), "Float [2, 3]", "Float [3, 2]"},
      {sum(floats), sum(at::ones({2, 3}, at::kInt)), "Float [2, 3]", "Int [2, 3]"},
      {sum(floats),
       [&](const RankGroup& group) { group.all_reduce(floats.clone(), ReduceOp::kMax); },
       "sum of a tensor", "max of a tensor"},
      {sum(floats), [&](const RankGroup& group) { group.all_gather(floats); }, "sum of a tensor",
       "all_gather of a tensor"},
      {sum(floats), [](const RankGroup& group) { group.barrier("epoch 3"); }, "sum of a tensor",
       "epoch 3"},
      {[&](const RankGroup& group) { group.broadcast(floats.clone(), 0); },
       [&](const RankGroup& group) { group.broadcast(floats.clone(), 1); }, "from rank 0",
       "from rank 1"},
      // The order: each waits in its first call.
      {[&](const RankGroup& group) {
         sum(floats, "a")(group);
         sum(floats, "b")(group);
       },
       [&](const RankGroup& group) {
         sum(floats, "b")(group);
         sum(floats, "a")(group);
       },
       "sum of a, ", "sum of b, "},
  };
  for (const Case& one : cases) {
    EXPECT_THAT(disagreement(GetParam(), one.zero, one.one),
                AllOf(HasSubstr("rank 0 issues"), HasSubstr(one.of_zero),
                      HasSubstr("rank 1 issues"), HasSubstr(one.of_one)));
  }
}

// Property: a rank that does not call is named after the timeout.
TEST_P(Misuse, RankThatDoesNotCallIsNamed) {
  WorldOptions options;
  options.timeout = milliseconds(100);
  ThreadRanks ranks(3, GetParam(), options);
  ranks.run([](World& world) { world.group().barrier("connect"); });
  EXPECT_THAT(error_of(
                  [&] {
                    ranks.run([&](World& world) {
                      if (world.rank() != 1) world.group().mean(1.0, "loss");
                    });
                  },
                  ErrorKind::kComm),
              AllOf(HasSubstr("mean of loss"), HasSubstr("rank 1")));
}

INSTANTIATE_TEST_SUITE_P(Backends, Misuse,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& each) { return name_of(each.param); });

}  // namespace
}  // namespace tessera::comm::rank_group_test
