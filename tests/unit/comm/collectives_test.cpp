// Every collective, dtype, size and number of ranks against a plain computation, bit for bit.
#include <ATen/ATen.h>

#include <atomic>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "kernels/host_sum.h"
#include "kernels/kernels.h"
#include "rank_pools.h"
#include "support/tensors.h"
#include "support/test.h"

namespace tessera::comm::collectives_test {
namespace {

using test::same_bits;

constexpr std::int64_t kSlices[] = {0, 1, 7, 64, 1000, 50000};

/// Rank `rank`'s values: reproducible, spread over magnitudes so that every order of additions has
/// its own rounding.
at::Tensor values(std::int64_t numel, at::ScalarType dtype, int rank, std::uint64_t seed) {
  auto tensor = at::empty({numel}, at::kDouble);
  auto* data = tensor.mutable_data_ptr<double>();
  std::uint64_t state = seed * 7919 + static_cast<std::uint64_t>(rank) * 104729 + 1;
  for (std::int64_t i = 0; i < numel; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const double unit = static_cast<double>(state >> 40) / static_cast<double>(1 << 24) - 0.5;
    data[i] = at::isIntegralType(dtype, false)
                  ? static_cast<double>((state >> 40) % 50)
                  : unit * std::pow(2.0, static_cast<double>(state >> 33 & 15U) - 8);
  }
  return tensor.to(dtype);
}

/// The sum as it is defined: one addition after the other, in rank order, in `dtype`.
at::Tensor plain_sum(const std::vector<at::Tensor>& addends, at::ScalarType dtype) {
  at::Tensor sum = addends.front().to(dtype);
  for (std::size_t i = 1; i < addends.size(); ++i) sum = sum + addends[i].to(dtype);
  return sum;
}

class Collectives : public testing::TestWithParam<std::tuple<ThreadBackend, int>> {
 protected:
  ThreadBackend backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  ThreadRanks& threads() const { return pool(backend(), ranks()); }
};

TEST_P(Collectives, AllGatherPutsEverySliceInItsPlace) {
  for (const auto dtype :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kByte}) {
    for (const auto slice : kSlices) {
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < ranks(); ++rank) parts.push_back(values(slice, dtype, rank, 1));
      const auto expected = at::cat(parts);
      threads().run([&](World& world) {
        const auto group = world.group(all_ranks(world.size()), "gather");
        auto buffer = at::zeros({slice * world.size()}, dtype);
        buffer.narrow(0, slice * world.rank(), slice)
            .copy_(parts[static_cast<std::size_t>(world.rank())]);
        group->issue(batch_of(AllGather{buffer}))->wait();
        EXPECT_TRUE(same_bits(buffer, expected)) << dtype << " " << slice;
      });
    }
  }
}

TEST_P(Collectives, ReduceScatterAddsInRankOrderInTheOutputsDtype) {
  const std::pair<at::ScalarType, at::ScalarType> dtypes[] = {
      {at::kFloat, at::kFloat},   {at::kBFloat16, at::kFloat}, {at::kHalf, at::kFloat},
      {at::kDouble, at::kDouble}, {at::kFloat, at::kDouble},   {at::kBFloat16, at::kBFloat16},
      {at::kHalf, at::kHalf},     {at::kLong, at::kLong},      {at::kByte, at::kLong}};
  for (const auto& [wire, result] : dtypes) {
    for (const auto slice : kSlices) {
      for (const auto into : {Into::kOverwrite, Into::kAdd}) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < ranks(); ++rank) {
          inputs.push_back(values(slice * ranks(), wire, rank, 2));
        }
        threads().run([&](World& world) {
          const auto group = world.group(all_ranks(world.size()), "reduce");
          std::vector<at::Tensor> slices;
          for (const auto& input : inputs) {
            slices.push_back(input.narrow(0, slice * world.rank(), slice));
          }
          const auto before = values(slice, result, 9, 3);
          auto expected = plain_sum(slices, result);
          if (into == Into::kAdd) expected = before + expected;
          auto input = inputs[static_cast<std::size_t>(world.rank())].clone();
          auto output = before.clone();
          group->issue(batch_of(ReduceScatter{input, output, into}))->wait();
          EXPECT_TRUE(same_bits(output, expected)) << wire << " " << result << " " << slice;
          EXPECT_TRUE(same_bits(input, inputs[static_cast<std::size_t>(world.rank())]));
        });
      }
    }
  }
}

TEST_P(Collectives, BroadcastPutsTheSourcesTensorEverywhere) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kByte}) {
    for (const auto slice : kSlices) {
      for (int source = 0; source < ranks(); ++source) {
        const auto expected = values(slice, dtype, source, 5);
        threads().run([&](World& world) {
          const auto group = world.group(all_ranks(world.size()), "gather");
          auto data = values(slice, dtype, world.rank(), 5);
          group->issue(batch_of(Broadcast{data, source}))->wait();
          EXPECT_TRUE(same_bits(data, expected)) << dtype << " " << slice << " " << source;
        });
      }
    }
  }
}

TEST_P(Collectives, AllReduceGivesTheSameBitsOnEveryRank) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong}) {
    // The last two go in two phases where there are more than two ranks, with uneven parts.
    for (const std::int64_t numel : {0L, 1L, 2L, 1003L, 50000L, 100003L}) {
      std::vector<at::Tensor> inputs;
      for (int rank = 0; rank < ranks(); ++rank) inputs.push_back(values(numel, dtype, rank, 4));
      const auto expected = plain_sum(inputs, dtype);
      threads().run([&](World& world) {
        auto data = inputs[static_cast<std::size_t>(world.rank())].clone();
        all_reduce(world.control(), data, "sum");
        EXPECT_TRUE(same_bits(data, expected)) << dtype << " " << numel;
      });
    }
  }
}

TEST_P(Collectives, AllReduceIntoAnotherTensorAddsInItsDtypeAndLeavesTheAddends) {
  const std::pair<at::ScalarType, at::ScalarType> dtypes[] = {{at::kFloat, at::kFloat},
                                                              {at::kBFloat16, at::kFloat},
                                                              {at::kHalf, at::kFloat},
                                                              {at::kFloat, at::kDouble},
                                                              {at::kBFloat16, at::kBFloat16}};
  for (const auto& [wire, result] : dtypes) {
    for (const std::int64_t numel : {0L, 1L, 2L, 1003L, 100003L}) {
      std::vector<at::Tensor> inputs;
      for (int rank = 0; rank < ranks(); ++rank) inputs.push_back(values(numel, wire, rank, 5));
      const auto expected = plain_sum(inputs, result);
      threads().run([&](World& world) {
        const auto& mine = inputs[static_cast<std::size_t>(world.rank())];
        const auto data = mine.clone();
        const auto output = at::full({numel}, 3.0, result);
        world.group(all_ranks(world.size()), "replicas")
            ->issue(batch_of(AllReduce{data, output}))
            ->wait();
        EXPECT_TRUE(same_bits(output, expected)) << wire << " " << result << " " << numel;
        EXPECT_TRUE(same_bits(data, mine));
      });
    }
  }
}

TEST_P(Collectives, AllToAllPutsEveryRangeInItsPlace) {
  // Ranges of all lengths, also empty ones, and whole ranks that neither send nor receive.
  const auto count = [&](std::int64_t scale, int from, int to) {
    return scale == 0 || (from + 2 * to) % 3 == 0 ? 0 : scale * (1 + (3 * from + to) % 5);
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kByte}) {
    for (const std::int64_t scale : {0, 1, 7, 10000}) {
      threads().run([&](World& world) {
        const int me = world.rank();
        AllToAll op;
        std::vector<at::Tensor> mine, expected;
        for (int other = 0; other < world.size(); ++other) {
          op.sends.push_back(count(scale, me, other));
          op.receives.push_back(count(scale, other, me));
          const auto seed = [](int from, int to) {
            return static_cast<std::uint64_t>(from * 100 + to);
          };
          mine.push_back(values(op.sends.back(), dtype, me, seed(me, other)));
          expected.push_back(values(op.receives.back(), dtype, other, seed(other, me)));
        }
        op.input = at::cat(mine);
        op.output = at::zeros_like(at::cat(expected));
        world.group(all_ranks(world.size()), "all to all")->issue(batch_of(op))->wait();
        EXPECT_TRUE(same_bits(op.output, at::cat(expected))) << dtype << " " << scale;
        EXPECT_TRUE(same_bits(op.input, at::cat(mine)));
      });
    }
  }
}

/// One collective as two ranks issue it, and how an error names the difference.
struct Misfit {
  Op of_rank_0;
  Op of_rank_1;
  std::string text;
};

std::vector<Misfit> misfits() {
  const auto numbers = [](std::int64_t numel) { return at::zeros({numel}); };
  const AllToAll fits{numbers(2), {1, 1}, numbers(2), {1, 1}};
  const auto bytes = [] { return at::zeros({12}, at::kByte); };
  return {{fits, AllToAll{numbers(3), {2, 1}, numbers(2), {1, 1}},
           "rank 1 sends 2 elements but rank 0 expects 1"},
          {fits, AllToAll{numbers(2), {1, 1}, numbers(3), {2, 1}},
           "rank 0 sends 1 elements but rank 1 expects 2"},
          {fits, AllToAll{numbers(3), {1, 2}, numbers(2), {1, 1}},
           "rank 1 sends 2 elements but rank 1 expects 1"},
          {Broadcast{numbers(8), 0}, Broadcast{numbers(8), 1},
           "rank 0 sends 8 elements but rank 1 expects 0"},
          // Naive: lengths are not compared, since the entries have only their sum.
          {RelayedGather{bytes(), {4, 8}}, RelayedGather{bytes(), {8, 4}},
           "rank 0 sends 4 elements but rank 1 expects 8"}};
}

TEST(InProcessCounts, ThatDoNotFitAreNamedOnEveryRank) {
  for (const Misfit& misfit : misfits()) {
    std::atomic<int> named = 0;
    pool(ThreadBackend::kInProcess, 2).run([&](World& world) {
      const auto group = world.group(all_ranks(world.size()), "counts");
      const auto work =
          group->issue(batch_of(world.rank() == 0 ? misfit.of_rank_0 : misfit.of_rank_1));
      try {
        work->wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kComm);
        EXPECT_NE(std::string(error.what()).find(misfit.text), std::string::npos) << error.what();
        ++named;
      }
    });
    EXPECT_EQ(named, 2) << misfit.text << ": was exchanged";
  }
}

// Naive: over Gloo a rank copies what it sends to itself, however much of that it expects.
TEST(GlooAllToAll, OwnCountsThatDoNotFitAreRefused) {
  ThreadRanks ranks(2, ThreadBackend::kGloo);
  std::string refusal;
  try {
    ranks.run([](World& world) {
      const AllToAll fits{at::zeros({2}), {1, 1}, at::zeros({2}), {1, 1}};
      const AllToAll own{at::zeros({3}), {1, 2}, at::zeros({2}), {1, 1}};
      world.group(all_ranks(world.size()), "counts")
          ->issue(batch_of(world.rank() == 0 ? fits : own))
          ->wait();
    });
  } catch (const Error& error) {
    refusal = error.what();
  }
  EXPECT_NE(refusal.find("found 8 B from this rank to itself, expected 4"), std::string::npos)
      << refusal;
}

TEST_P(Collectives, CancellingValuesShowTheOrderOfAdditions) {
  const std::vector<float> by_rank = {1e8F, 1.0F, -1e8F, 1.0F, 1e8F, 3.0F, -1e8F};
  float expected = by_rank[0];
  for (int rank = 1; rank < ranks(); ++rank) expected += by_rank[static_cast<std::size_t>(rank)];
  threads().run([&](World& world) {
    const float mine = by_rank[static_cast<std::size_t>(world.rank())];
    auto data = at::full({3}, mine, at::kFloat);
    all_reduce(world.control(), data, "cancel");
    EXPECT_TRUE(same_bits(data, at::full({3}, expected, at::kFloat)));
    auto output = at::zeros({2}, at::kFloat);
    auto input = at::full({2 * world.size()}, mine, at::kFloat);
    world.group(all_ranks(world.size()), "reduce")
        ->issue(batch_of(ReduceScatter{input, output}))
        ->wait();
    EXPECT_TRUE(same_bits(output, at::full({2}, expected, at::kFloat)));
  });
}

TEST_P(Collectives, OpsOfABatchGoOutTogether) {
  threads().run([&](World& world) {
    const auto group = world.group(all_ranks(world.size()), "gather");
    const auto n = world.size();
    auto gathered = at::full({4 * n}, -1.0F);
    gathered.narrow(0, 4 * world.rank(), 4).fill_(world.rank());
    auto reduced = at::empty({3}, at::kFloat);
    auto summed = at::ones({5}, at::kDouble);
    auto empty = at::empty({0}, at::kFloat);
    Batch batch;
    batch.label.unit = "mixed";
    batch.ops = {AllGather{gathered}, AllGather{empty},
                 ReduceScatter{at::ones({3 * n}, at::kBFloat16), reduced}, AllReduce{summed}};
    EXPECT_EQ(batch.bytes(), 16 * n + 6 * n + 40);
    group->issue(std::move(batch))->wait();
    for (int rank = 0; rank < n; ++rank) {
      EXPECT_TRUE(
          same_bits(gathered.narrow(0, 4 * rank, 4), at::full({4}, static_cast<float>(rank))));
    }
    EXPECT_TRUE(same_bits(reduced, at::full({3}, static_cast<float>(n))));
    EXPECT_TRUE(same_bits(summed, at::full({5}, static_cast<double>(n), at::kDouble)));
  });
}

TEST_P(Collectives, SeveralUnderWayAreWaitedForInAnyOrder) {
  threads().run([&](World& world) {
    const auto group = world.group(all_ranks(world.size()), "gather");
    std::vector<at::Tensor> buffers;
    std::vector<std::unique_ptr<Work>> works;
    for (std::uint32_t i = 0; i < 8; ++i) {
      buffers.push_back(at::full({16L * world.size()},
                                 static_cast<float>(world.rank()) + 10.0F * static_cast<float>(i)));
      works.push_back(group->issue(batch_of(AllGather{buffers.back()}, "unit", i)));
    }
    for (std::uint32_t i = 8; i-- > 0;) {
      works[i]->wait();
      works[i]->wait();
      for (int rank = 0; rank < world.size(); ++rank) {
        EXPECT_EQ(buffers[i][16 * rank].item<float>(),
                  static_cast<float>(rank + 10 * static_cast<int>(i)));
      }
    }
  });
}

TEST_P(Collectives, BytesOfDifferentLengthsAreGathered) {
  threads().run([&](World& world) {
    const auto all = all_gather_bytes(
        world.control(), std::string(static_cast<std::size_t>(world.rank()) * 3, 'a'), "names");
    ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      EXPECT_EQ(all[rank], std::string(rank * 3, 'a'));
    }
    EXPECT_EQ(all_gather_bytes(world.control(), "", "nothing"),
              std::vector<std::string>(all.size()));
    barrier(world.control(), "end");
  });
}

TEST_P(Collectives, BytesOfAKnownLengthAreGatheredInOneExchange) {
  threads().run([&](World& world) {
    const auto text_of = [](int rank, std::size_t length) {
      return std::string(length, static_cast<char>('a' + rank));
    };
    for (const std::size_t length : {0UL, 1UL, 8UL, 100001UL}) {
      const auto all = all_gather_fixed(world.control(), text_of(world.rank(), length), "values");
      ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
      for (int rank = 0; rank < world.size(); ++rank) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)], text_of(rank, length));
      }
    }
  });
}

TEST_P(Collectives, BitsOfAnyRankAreSetOnAll) {
  threads().run([&](World& world) {
    for (const std::size_t bits : {0UL, 1UL, 7UL, 8UL, 9UL, 1003UL}) {
      // Every rank has some bits of its own, and some that others have, too.
      const auto has = [&](int rank, std::size_t bit) {
        return bit % 11 == static_cast<std::size_t>(rank) || (bit % 5 == 0 && rank % 2 == 1);
      };
      std::vector<bool> mine(bits), expected(bits);
      for (std::size_t i = 0; i < bits; ++i) {
        mine[i] = has(world.rank(), i);
        for (int rank = 0; rank < world.size(); ++rank) expected[i] = expected[i] || has(rank, i);
      }
      EXPECT_EQ(any_of_ranks(world.control(), mine, "bits"), expected) << bits;
    }
  });
}

TEST_P(Collectives, WholeNumbersAreAddedOnceFromEachRank) {
  threads().run([&](World& world) {
    for (const std::int64_t n : {0, 1, 5, 1000}) {
      std::vector<std::int64_t> mine, expected;
      for (std::int64_t i = 0; i < n; ++i) {
        mine.push_back((i + 1) * (world.rank() + 1) * (i % 2 == 0 ? 1 : -1));
        const std::int64_t all = world.size() * (world.size() + 1) / 2;
        expected.push_back((i + 1) * all * (i % 2 == 0 ? 1 : -1));
      }
      EXPECT_EQ(sum_of_ranks(world.control(), mine, "numbers"), expected) << n;
    }
  });
}

// Naive: every rank's whole text at every other one.
TEST_P(Collectives, TheFirstRankWithAnotherTextIsFoundOnAllWithBothTexts) {
  const std::string first = "as all", last = "of the others";
  for (int other = 1; other <= ranks(); ++other) {
    threads().run([&](World& world) {
      const auto found =
          first_that_differs(world.control(), world.rank() < other ? first : last, "texts");
      ASSERT_EQ(found.has_value(), other < ranks());
      if (!found) return;
      EXPECT_EQ(found->rank, other);
      EXPECT_EQ(found->of_first, first);
      EXPECT_EQ(found->of_rank, last);
    });
  }
}

TEST_P(Collectives, ARankOfAnotherHashIsNoticedOnAll) {
  constexpr std::uint64_t kHash = 0xfedcba9876543210;
  for (int other = -1; other < ranks(); ++other) {
    for (const std::uint64_t bit : {0U, 31U, 63U}) {
      threads().run([&](World& world) {
        const auto mine = world.rank() == other ? kHash ^ std::uint64_t{1} << bit : kHash;
        const bool same = other < 0 || ranks() == 1;
        EXPECT_EQ(all_agree(world.control(), {bit, mine, 0}, "hashes"),
                  (std::vector<bool>{true, same, true}));
      });
    }
  }
}

// Sums that are relayed are formed in the same order as those that go straight.
TEST_P(Collectives, RelayedSumsHaveTheBitsOfDirectOnes) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kLong}) {
    for (const std::int64_t numel : {1L, 5L, 1003L, 100003L}) {
      threads().run([&](World& world) {
        const auto mine = values(numel, dtype, world.rank(), 8);
        const auto direct = mine.clone();
        const auto relayed = mine.clone();
        const auto group = world.group(all_ranks(world.size()), "sums");
        group->issue(batch_of(AllReduce{direct}))->wait();
        group->issue(batch_of(AllReduce{relayed, {}, Route::kRelayed}))->wait();
        EXPECT_TRUE(same_bits(relayed, direct)) << dtype << " " << numel;
      });
    }
  }
}

TEST(FixedBytes, TakeOneExchangeAndLengthsThatDifferAreNamed) {
  ThreadRanks ranks(2, ThreadBackend::kInProcess);
  std::atomic<int> issued = 0;
  const test_hooks::Set counted(test_hooks::before_issue, [&](int, const Batch&) { ++issued; });
  ranks.run([](World& world) { all_gather_fixed(world.control(), "12345678", "values"); });
  EXPECT_EQ(issued, 2) << "one by each rank";
  ranks.run([](World& world) { all_gather_bytes(world.control(), "12345678", "values"); });
  EXPECT_EQ(issued, 6);
  std::string error;
  try {
    ranks.run([](World& world) {
      all_gather_fixed(world.control(), world.rank() == 0 ? "1234" : "12345678", "values");
    });
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_NE(error.find("ranks disagree"), std::string::npos) << error;
  EXPECT_NE(error.find("values"), std::string::npos) << error;
}

class FourRanks : public testing::TestWithParam<ThreadBackend> {};

TEST_P(FourRanks, GroupsOfAMeshAxisStayAmongThemselves) {
  pool(GetParam(), 4).run([&](World& world) {
    const auto shape = MeshShape::dense(1, 2, 2, 1, 1);
    const Mesh mesh = world.mesh(shape);
    for (const auto name : {axis::kReplicate, axis::kShard}) {
      const auto ranks_of_axis = shape.group_of(world.rank(), {name});
      const auto group = world.group(ranks_of_axis, "axis");
      EXPECT_EQ(group, world.group(ranks_of_axis, "axis"));
      EXPECT_EQ(group->rank(), mesh.coordinate(name));
      auto sum = at::full({1}, world.rank(), at::kLong);
      all_reduce(*group, sum, std::string(name));
      EXPECT_EQ(sum.item<std::int64_t>(), ranks_of_axis[0] + ranks_of_axis[1]);
    }
  });
}

std::string case_name(const testing::TestParamInfo<std::tuple<ThreadBackend, int>>& info) {
  return name_of(std::get<0>(info.param)) + "On" + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(All, Collectives,
                         testing::Combine(testing::Values(ThreadBackend::kInProcess,
                                                          ThreadBackend::kGloo),
                                          testing::Values(1, 2, 3, 4, 7)),
                         case_name);

INSTANTIATE_TEST_SUITE_P(All, FourRanks,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& one) { return name_of(one.param); });

TEST(Sum, BoolAndNarrowingPairsAreRefused) {
  EXPECT_FALSE(kernels::can_sum(at::kBool, at::kBool));
  EXPECT_FALSE(kernels::can_sum(at::kFloat, at::kBFloat16));
  EXPECT_FALSE(kernels::can_sum(at::kDouble, at::kFloat));
  EXPECT_TRUE(kernels::can_sum(at::kBFloat16, at::kFloat));
}

TEST(Sum, NegativeZeroSurvives) {
  const auto zero = at::full({4}, -0.0F);
  auto result = at::ones({4}, at::kFloat);
  kernels::sum_host_memory({zero.const_data_ptr(), zero.const_data_ptr()}, at::kFloat,
                           {result.mutable_data_ptr(), at::kFloat, 4, /*adds=*/false});
  EXPECT_TRUE(result.signbit().all().item<bool>());
}

TEST(Batch, TensorsThatDoNotFitAreRefused) {
  SoloGroup group("alone");
  const auto strided = at::zeros({4, 4}).t();
  EXPECT_THROW(group.issue(batch_of(AllGather{strided})), Error);
  EXPECT_THROW(group.issue(batch_of(AllGather{at::Tensor()})), Error);
  EXPECT_THROW(group.issue(batch_of(ReduceScatter{at::zeros({4}), at::zeros({3})})), Error);
  EXPECT_THROW(group.issue(batch_of(ReduceScatter{at::zeros({4}), at::zeros({4}, at::kHalf)})),
               Error);
  EXPECT_THROW(group.issue(batch_of(AllReduce{at::zeros({4}), at::zeros({3})})), Error);
  EXPECT_THROW(group.issue(batch_of(Combine{at::zeros({4})})), Error);
  EXPECT_THROW(group.issue(batch_of(RelayedGather{at::zeros({4}, at::kByte), {5}})), Error);
  EXPECT_THROW(group.issue(batch_of(RelayedGather{at::zeros({4}, at::kByte), {2, 2}})), Error);
  EXPECT_THROW(group.issue(batch_of(AllReduce{at::zeros({4}), at::zeros({4}, at::kHalf)})), Error);
}

}  // namespace
}  // namespace tessera::comm::collectives_test
