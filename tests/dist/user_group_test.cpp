// Collectives for users: values against a local computation, what is refused, what ranks that
// differ are told, and how they mix with a sharded module's own.

#include <atomic>

#include "dist/drawn_calls.h"
#include "support/plain.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/group.h"

namespace tessera::test::user_group_test {
namespace {

constexpr at::ScalarType kFloats[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};
constexpr at::ScalarType kWhole[] = {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte};
// The last one goes in two rounds where there are three ranks.
const std::vector<std::vector<std::int64_t>> kShapes = {{}, {0}, {2, 3}, {2, 50000}};

/// One rank's: halves of many sizes, whole numbers that overflow int8 when they are added, bools of
/// both kinds.
at::Tensor values(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto raw = seeded(static_cast<std::uint64_t>(7 + rank), sizes).to(at::kDouble);
  if (dtype == at::kBool) return raw > 0;
  if (at::isIntegralType(dtype, false)) return (raw * 100).abs().clamp_max(120).to(dtype);
  return raw.to(dtype);
}

std::vector<at::Tensor> of_all(int count, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < count; ++rank) all.push_back(values(rank, sizes, dtype));
  return all;
}

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

/// One addition after the other, in rank order.
at::Tensor wide_sum(const std::vector<at::Tensor>& all) {
  auto sum = all.front().to(sum_dtype(all.front().scalar_type()), /*non_blocking=*/false,
                            /*copy=*/true);
  for (std::size_t i = 1; i < all.size(); ++i) sum = sum + all[i].to(sum.scalar_type());
  return sum;
}

class Groups : public ::testing::TestWithParam<std::tuple<int, ThreadBackend>> {
 protected:
  int count() const { return std::get<0>(GetParam()); }
  ThreadBackend backend() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(World&)>& body) const { ranks(count(), backend()).run(body); }
};
INSTANTIATE_TEST_SUITE_P(Grid, Groups,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(ThreadBackend::kInProcess,
                                                              ThreadBackend::kGloo)));

// A sum is the one of additions in rank order, of 16-bit floats rounded once, on every rank.
TEST_P_ON_RANKS(Groups, SumsAreThoseOfOneAdditionAfterTheOther, count(), backend()) {
  const auto group = world.group();
  const auto check = [&](at::ScalarType dtype) {
    for (const auto& sizes : kShapes) {
      const auto all = of_all(world.size(), sizes, dtype);
      auto tensor = all[static_cast<std::size_t>(world.rank())].clone();
      group.all_reduce(tensor, ReduceOp::kSum, "sum");
      EXPECT_TRUE(same_bits(tensor, wide_sum(all).to(dtype))) << dtype << sizes;
    }
  };
  for (const auto dtype : kFloats) check(dtype);
  for (const auto dtype : kWhole) check(dtype);
}

// The largest and smallest of all ranks, of every dtype; NaN wherever one rank has it.
TEST_P_ON_RANKS(Groups, MaxAndMinAreThoseOfAllRanks, count(), backend()) {
  const auto group = world.group();
  const auto check = [&](at::ScalarType dtype) {
    for (const auto& sizes : kShapes) {
      const auto all = of_all(world.size(), sizes, dtype);
      const auto& mine = all[static_cast<std::size_t>(world.rank())];
      auto largest = mine.clone();
      group.all_reduce(largest, ReduceOp::kMax);
      EXPECT_TRUE(same_bits(largest, at::amax(at::stack(all), 0))) << dtype << sizes;
      auto smallest = mine.clone();
      group.all_reduce(smallest, ReduceOp::kMin);
      EXPECT_TRUE(same_bits(smallest, at::amin(at::stack(all), 0))) << dtype << sizes;
    }
  };
  for (const auto dtype : kFloats) check(dtype);
  for (const auto dtype : kWhole) check(dtype);
  check(at::kBool);
  auto one = at::full({2}, world.rank() == 0 ? std::nan("") : 1.0);
  group.all_reduce(one, ReduceOp::kMax);
  EXPECT_TRUE(one.isnan().all().item<bool>());
}

// A mean is the sum over the number of ranks, rounded once, and leaves what was given.
TEST_P_ON_RANKS(Groups, MeansAreSumsOverTheNumberOfRanks, count(), backend()) {
  const auto group = world.group();
  for (const auto dtype : kFloats) {
    for (const auto& sizes : kShapes) {
      const auto all = of_all(world.size(), sizes, dtype);
      const auto mine = all[static_cast<std::size_t>(world.rank())].clone();
      const auto expected = over(wide_sum(all), world.size()).to(dtype);
      EXPECT_TRUE(same_bits(group.mean(mine, "loss"), expected)) << dtype << sizes;
      EXPECT_TRUE(same_bits(mine, all[static_cast<std::size_t>(world.rank())]));
    }
  }
  // The sum is above what float16 holds, also where it travels in parts.
  for (const std::int64_t numel : {3, 200'000}) {
    const auto most = at::full({numel}, 60'000, at::kHalf);
    EXPECT_TRUE(same_bits(group.mean(most), most)) << numel;
  }
  // Not a float: 0.1 and its thirds have their digits.
  double sum = 0;
  for (int rank = 0; rank < world.size(); ++rank) sum += 0.1 * (rank + 1);
  EXPECT_EQ(group.mean(0.1 * (world.rank() + 1)), sum / world.size());
}

// Everyone's tensor in rank order, of every dtype.
TEST_P_ON_RANKS(Groups, GathersHaveEveryRanksTensor, count(), backend()) {
  const auto group = world.group();
  const auto check = [&](at::ScalarType dtype) {
    for (const auto& sizes : kShapes) {
      const auto all = of_all(world.size(), sizes, dtype);
      const auto found = group.all_gather(all[static_cast<std::size_t>(world.rank())], "rows");
      ASSERT_EQ(found.size(), all.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_TRUE(same_bits(found[i], all[i])) << dtype << sizes;
      }
    }
  };
  for (const auto dtype : kFloats) check(dtype);
  for (const auto dtype : kWhole) check(dtype);
  check(at::kBool);
}

// The source's tensor everywhere, of every dtype, from every rank.
TEST_P_ON_RANKS(Groups, BroadcastsAreTheTensorOfTheirSource, count(), backend()) {
  const auto group = world.group();
  const auto check = [&](at::ScalarType dtype) {
    for (const auto& sizes : kShapes) {
      for (int source = 0; source < world.size(); ++source) {
        auto tensor = values(world.rank(), sizes, dtype);
        group.broadcast(tensor, source, "weights");
        EXPECT_TRUE(same_bits(tensor, values(source, sizes, dtype))) << dtype << sizes;
      }
    }
  };
  for (const auto dtype : kFloats) check(dtype);
  for (const auto dtype : kWhole) check(dtype);
  check(at::kBool);
}

// No rank leaves a barrier before the last one has come.
TEST_P(Groups, ABarrierIsLeftWhenAllHaveCome) {
  std::atomic<int> came{0};
  run([&](World& world) {
    const auto group = world.group();
    for (int round = 1; round <= 20; ++round) {
      ++came;
      group.barrier("round");
      EXPECT_GE(came.load(), round * world.size());
    }
  });
}

// Groups along axes are the ranks that differ on these alone; a name that is no axis is named.
TEST(GroupsOfMeshes, AreTheRanksAlongTheirAxes) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    ranks(4, backend).run([](World& world) {
      const auto mesh =
          world.mesh(MeshShapes(MeshShape::dense(1, 2, 2, 1, 1), MeshShape::sparse(1, 2, 1, 2, 1)));
      const int rank = world.rank();
      const auto sum = [&](const Group& group) {
        auto one = at::full({}, 1 << rank, at::kLong);
        group.all_reduce(one, ReduceOp::kSum, "ranks");
        return one.item<std::int64_t>();
      };
      const std::int64_t replica = rank < 2 ? 0b0011 : 0b1100;
      const std::int64_t across = rank % 2 == 0 ? 0b0101 : 0b1010;
      EXPECT_EQ(sum(mesh.group("dp_shard")), replica);
      EXPECT_EQ(sum(mesh.group("ep")), replica);
      EXPECT_EQ(sum(mesh.group("dp_replicate")), across);
      EXPECT_EQ(sum(mesh.group({"dp_replicate", "dp_shard"})), 0b1111);
      EXPECT_EQ(sum(mesh.group("tp")), 1 << rank) << "one rank";
      EXPECT_EQ(mesh.group("dp_replicate").ranks(), (std::vector<int>{rank % 2, rank % 2 + 2}));
      EXPECT_EQ(mesh.group("dp_replicate").rank(), rank / 2);
      EXPECT_THAT(thrown_by([&] { mesh.group("dp"); }),
                  Says("found the axis dp, expected one of", "dp_shard 2"));
      EXPECT_THAT(thrown_by([&] { Mesh().group("dp_shard"); }), Says("found no world"));
    });
  }
}

// A value that cannot be sent is refused by name, on any number of ranks, and nothing is lost.
TEST_P_ON_RANKS(Groups, WhatCannotBeSentIsRefusedByWhatItIs, count(), backend()) {
  const auto group = world.group();
  const auto refused = [&](const auto& call, const std::string& found) {
    EXPECT_REFUSED(kUsage, call(), found);
  };
  const auto every = [&](const at::Tensor& tensor, const std::string& found) {
    refused([&] { group.all_reduce(tensor, ReduceOp::kMax, "x"); }, "all_reduce of x: " + found);
    refused([&] { group.all_gather(tensor); }, "all_gather: " + found);
    refused([&] { group.broadcast(tensor); }, "broadcast: " + found);
    refused([&] { group.mean(tensor, "loss"); }, "all_reduce of loss: " + found);
  };
  every(at::Tensor(), "found an undefined tensor");
  every(at::eye(2).to_sparse(), "found a Sparse tensor");
  every(at::empty({2}, at::TensorOptions().device(at::kMeta)), "found a tensor on meta");
  every(at::zeros({2}, at::kComplexFloat), "found the dtype ComplexFloat");
  every(at::zeros({2, 3}).t(), "found sizes [3, 2] with strides [1, 3]");
  every(at::zeros({2}).requires_grad_(), "found a tensor that requires grad");
  refused([&] { group.all_reduce(at::zeros({2}, at::kBool)); }, "found a sum of Bool");
  refused([&] { group.mean(at::zeros({2}, at::kLong)); }, "found the dtype Long");
  for (const int source : {-1, world.size()}) {
    refused([&] { group.broadcast(at::zeros({2}), source); }, concat("group_src ", source));
  }
  EXPECT_EQ(group.mean(2.0), 2.0) << "the World continues";
}

// Without grad mode a parameter may be given, and what was written in place has a new version.
TEST_P_ON_RANKS(Groups, AutogradNoticesWhatIsWrittenInPlace, count(), backend()) {
  const auto group = world.group();
  auto parameter = values(world.rank(), {3}, at::kFloat).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    group.broadcast(parameter);
  }
  EXPECT_TRUE(same_bits(parameter, values(0, {3}, at::kFloat)));
  EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
  using Write = std::function<void(const at::Tensor&)>;
  for (const Write& write : {Write([&](const auto& x) { group.all_reduce(x); }),
                             Write([&](const auto& x) { group.all_reduce(x, ReduceOp::kMax); }),
                             Write([&](const auto& x) { group.broadcast(x); })}) {
    const auto x = at::ones({3});
    const auto loss = (parameter * x).sum();
    write(x);
    EXPECT_THAT(thrown_by([&] { backward(loss); }), Says("modified by an inplace operation"));
  }
}

// ------------------------------------------------------------------------------------- differences

/// Ranks that find out soon.
comm::ThreadRanks& impatient(ThreadBackend backend) {
  static std::map<ThreadBackend, std::unique_ptr<comm::ThreadRanks>> kept;
  auto& slot = kept[backend];
  if (!slot) {
    WorldOptions options;
    options.timeout = std::chrono::seconds(3);
    options.blocked_after = std::chrono::milliseconds(200);
    slot = std::make_unique<comm::ThreadRanks>(3, backend, options);
  }
  return *slot;
}

std::vector<std::string> errors(ThreadBackend backend, const std::function<void(World&)>& body) {
  std::vector<std::string> all(3);
  impatient(backend).run([&](World& world) {
    all[static_cast<std::size_t>(world.rank())] = thrown_by([&] { body(world); });
  });
  return all;
}

using Act = std::function<void(const Group&)>;

struct Misuse {
  std::string name;
  Act one;     ///< of rank 1
  Act others;  ///< of the others
  std::string found, expected;
};

const std::vector<Misuse>& misuses() {
  const auto reduce = [](const Group& group) { group.all_reduce(at::ones({2, 3})); };
  static const std::vector<Misuse> all = {
      {"Operation", [](const auto& g) { g.broadcast(at::ones({2, 3})); }, reduce,
       "broadcast of an unnamed call", "all_reduce of an unnamed call"},
      {"Barrier", [](const auto& g) { g.barrier("end"); }, reduce, "barrier of end",
       "all_reduce of an unnamed call"},
      {"Mean", [](const auto& g) { g.mean(at::ones({2, 3})); }, reduce, "mean of [2, 3]",
       "sum of [2, 3]"},
      {"ReduceOp", [](const auto& g) { g.all_reduce(at::ones({2, 3}), ReduceOp::kMax); },
       [](const auto& g) { g.all_reduce(at::ones({2, 3}), ReduceOp::kMin); }, "max of [2, 3]",
       "min of [2, 3]"},
      // As many elements, as many bytes.
      {"Shape", [](const auto& g) { g.all_reduce(at::ones({3, 2})); }, reduce, "sum of [3, 2]",
       "sum of [2, 3]"},
      {"Size", [](const auto& g) { g.all_gather(at::ones({4})); },
       [](const auto& g) { g.all_gather(at::ones({5})); }, "from each [4]", "from each [5]"},
      {"Dtype", [](const auto& g) { g.broadcast(at::ones({2, 3}, at::kInt)); },
       [](const auto& g) { g.broadcast(at::ones({2, 3})); }, "24 B Int", "24 B Float"},
      {"Source", [](const auto& g) { g.broadcast(at::ones({2}), 1); },
       [](const auto& g) { g.broadcast(at::ones({2}), 2); }, "from rank 1", "from rank 2"},
      {"Order",
       [](const auto& g) {
         g.all_reduce(at::ones({2}), ReduceOp::kSum, "loss");
         g.all_reduce(at::ones({2}), ReduceOp::kSum, "hits");
       },
       [](const auto& g) {
         g.all_reduce(at::ones({2}), ReduceOp::kSum, "hits");
         g.all_reduce(at::ones({2}), ReduceOp::kSum, "loss");
       },
       "all_reduce of loss", "all_reduce of hits"},
  };
  return all;
}

class Misuses : public ::testing::TestWithParam<std::tuple<std::size_t, ThreadBackend>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Misuses,
                         ::testing::Combine(::testing::Range(std::size_t{0}, misuses().size()),
                                            ::testing::Values(ThreadBackend::kInProcess,
                                                              ThreadBackend::kGloo)),
                         [](const auto& one) {
                           return misuses()[std::get<0>(one.param)].name +
                                  (std::get<1>(one.param) == ThreadBackend::kGloo ? "Gloo" : "");
                         });

// Ranks that call different things are told so, all of them, with both entries; then the World can
// be used again.
TEST_P(Misuses, IsNamedOnEveryRank) {
  const auto& [index, backend] = GetParam();
  const Misuse& misuse = misuses()[index];
  const auto said = errors(backend, [&](World& world) {
    const auto group = world.group();
    (world.rank() == 1 ? misuse.one : misuse.others)(group);
  });
  EXPECT_THAT(said, Each(Not(std::string())));
  EXPECT_THAT(said, Contains(Says("ranks disagree", misuse.found, misuse.expected)));
  impatient(backend).run([](World& world) { EXPECT_EQ(world.group().mean(1.5), 1.5); });
}

// Drawn programs, of which one rank has a different one. (In processes:
// tests/unit/comm/process_test.cpp.)
TEST(Disagreements, CanBeCaughtOnEveryThreadAndTheRunContinues) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    for (const int count : {2, 3}) {
      WorldOptions options;
      options.timeout = std::chrono::seconds(20);
      options.blocked_after = std::chrono::milliseconds(100);
      comm::ThreadRanks(count, backend, options).run([&](World& world) {
        catch_disagreements(world, static_cast<unsigned>(count), 5,
                            [](World& all) { EXPECT_EQ(all.group().mean(1.5), 1.5); });
      });
    }
  }
}

// A rank that does not call is named by those that wait for it, and the World is aborted for all.
TEST(MissedCalls, AreNamedWithinTheTimeout) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    std::vector<std::string> said(3);
    impatient(backend).run([&](World& world) {
      const auto group = world.group();
      group.barrier();
      if (world.rank() == 1) return;
      auto& mine = said[static_cast<std::size_t>(world.rank())];
      mine = thrown_by([&] { group.all_gather(at::ones({2}), "losses"); });
      EXPECT_TRUE(world.aborted());
      EXPECT_THAT(thrown_by([&] { group.barrier(); }), Not(std::string()));
    });
    EXPECT_THAT(said[0] + said[2], Says("all_gather of losses", "waited 3 s for rank 1"));
    EXPECT_THAT(said[0], Not(std::string()));
    EXPECT_THAT(said[2], Not(std::string()));
  }
}

// A rank whose tensor is refused ends the others' wait with its error, where it leaves the body.
TEST(MissedCalls, OfARankThatWasRefusedEndWithItsError) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    std::vector<std::string> said(3);
    const auto thrown = thrown_by([&] {
      impatient(backend).run([&](World& world) {
        const auto group = world.group();
        const auto x = at::ones({2, 3});
        const auto call = [&] { group.all_reduce(world.rank() == 1 ? x.t() : x); };
        if (world.rank() == 1) return call();
        said[static_cast<std::size_t>(world.rank())] = thrown_by(call);
      });
    });
    EXPECT_THAT(thrown, Says("all_reduce: found sizes [3, 2]"));
    EXPECT_THAT(said[0], Says("found sizes [3, 2]"));
    EXPECT_THAT(said[2], Says("found sizes [3, 2]"));
  }
}

// --------------------------------------------------------------------------------- sharded modules

constexpr std::int64_t kWidth = 5;

/// Three steps; `call(where)` is called around and inside forwards and backwards.
std::vector<Tensors> steps(World& world, const std::function<void(const char* where)>& call) {
  ShardedChain model(data_mesh(world), 1, 3, kWidth);
  const auto optimizer = make_sgd(model.handle, sgd(0.1));
  for (const auto& block : model.chain->blocks) block->before = [&] { call("inside a forward"); };
  std::vector<Tensors> gradients;
  for (int step = 0; step < 3; ++step) {
    call("before forward");
    const auto y = model.handle.forward(input_of(world.rank(), step, kWidth));
    call("after forward");
    y.register_hook([&](const at::Tensor&) { call("inside the backward"); });
    const auto loss = squares(y);
    call("before backward");
    backward(loss);
    call("after backward");
    gradients.push_back(whole_gradients(model.handle));
    optimizer->step();
    call("after the optimizer's step");
    model.handle.zero_grad();
  }
  return gradients;
}

// A program may call them anywhere, while gathers and reductions are in flight: both have the bits
// that they have alone.
TEST_P_ON_RANKS(Groups, StandAnywhereInAStepOfAModule, count(), backend()) {
  const auto alone = steps(world, [](const char*) {});
  const auto group = data_mesh(world).group("dp_shard");
  int calls = 0;
  const auto among_units = steps(world, [&](const char* where) {
    const double number = ++calls;
    EXPECT_EQ(group.mean(number + world.rank(), where), number + (world.size() - 1) / 2.0);
    const auto large = values(world.rank(), {40000}, at::kFloat);
    auto sum = large.clone();
    group.all_reduce(sum, ReduceOp::kSum, where);
    EXPECT_TRUE(same_bits(sum, wide_sum(of_all(world.size(), {40000}, at::kFloat)))) << where;
    EXPECT_TRUE(same_bits(group.all_gather(large, where).back(),
                          values(world.size() - 1, {40000}, at::kFloat)));
  });
  EXPECT_EQ(calls, 3 * 9);
  ASSERT_EQ(alone.size(), among_units.size());
  for (std::size_t i = 0; i < alone.size(); ++i) expect_same(among_units[i], alone[i]);
}

// A call before a forward on one rank and after it on the others: an error on all of them, and no
// hang. Over Gloo it says which rank waits in what.
TEST(GroupsAndModules, ACallOnTheOtherSideOfAForwardIsAnErrorOnAllRanks) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    const auto said = errors(backend, [&](World& world) {
      ShardedChain model(data_mesh(world), 1, 2, kWidth);
      const auto group = world.group();
      group.barrier();
      const auto forward = [&] { model.handle.forward(input_of(world.rank(), 0, kWidth)); };
      forward();
      if (world.rank() == 1) group.mean(1.0, "accuracy");
      forward();
      if (world.rank() != 1) group.mean(1.0, "accuracy");
    });
    EXPECT_THAT(said, Each(Not(std::string())));
    if (backend == ThreadBackend::kGloo) {
      EXPECT_THAT(
          said, Contains(Says("ranks wait for each other", "rank 1 waits in all_reduce of accuracy",
                              "waits in all_gather of")));
    } else {
      // Whose time is over first: rank 1's for the others in the call, or theirs for it.
      EXPECT_THAT(said,
                  Contains(AnyOf(Says("waited 3 s for rank 1"), Says("waited 3 s for rank 0, 2"))));
    }
  }
}

// An unsharded parameter that was resharded says so, instead of showing foreign memory.
TEST_ON_RANKS(GroupsAndModules, ReleasedParametersAreRefused, 2) {
  const auto module = std::make_shared<Scale>(at::ones({kWidth}));
  const auto handle = fully_shard(module, data_mesh(world));
  const auto group = world.group();
  const at::NoGradGuard no_grad;
  EXPECT_THAT(thrown_by([&] { group.all_reduce(module->weight); }), Says("sharded"));
  EXPECT_EQ(group.mean(1.0), 1.0);
}

}  // namespace
}  // namespace tessera::test::user_group_test
