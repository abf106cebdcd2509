// Attention over ranks that share the positions of rows: results and gradients have the bits of one
// rank with the same parts (gather), or of one rank as it is (heads), for every mask; and they are
// those of the whole row in fp64.
#include "nn/attention/context_attention.h"

#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>

#include "base/test_hooks.h"
#include "grad/region.h"
#include "layout/context_cut.h"
#include "nn/attention/attention.h"
#include "parallel/context_exchange.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/context.h"

namespace tessera::nn::context_attention_test {
namespace {

using test::ranks;
using test::same_bits;
using test::seeded;

constexpr std::int64_t kRows = 2, kGroups = 4, kRepeat = 2, kHeadDim = 8;

struct Mask {
  std::string name;
  std::optional<std::int64_t> window = {};
  bool packed = false;
  bool both_ways = false;  ///< runs of positions that see each other
  bool sinks = false;
  Scores scores = Scores::kOfInputs;
};

const std::vector<Mask>& masks() {
  static const std::vector<Mask> all{
      {.name = "causal"},
      {.name = "window", .window = 24},
      {.name = "documents", .packed = true},
      {.name = "window and documents", .window = 40, .packed = true},
      {.name = "both ways in a window", .window = 24, .both_ways = true},
      {.name = "sinks", .sinks = true, .scores = Scores::kWide},
      {.name = "sinks, window and documents",
       .window = 24,
       .packed = true,
       .sinks = true,
       .scores = Scores::kWide},
  };
  return all;
}

/// What is given, and what is found: of whole rows.
struct Tensors {
  at::Tensor q, k, v, sinks, result_grad;
};

Tensors tensors(std::int64_t positions, at::ScalarType dtype = at::kFloat) {
  const auto made = [&](std::uint64_t seed, at::IntArrayRef sizes) {
    return seeded(seed, sizes).to(dtype);
  };
  return {made(1, {kRows, kGroups, positions, kRepeat, kHeadDim}),
          made(2, {kRows, kGroups, positions, 1, kHeadDim}),
          made(3, {kRows, positions, kGroups * kHeadDim}), made(4, {kGroups * kRepeat}),
          made(5, {kRows, positions, kGroups * kRepeat * kHeadDim})};
}

/// Documents of 1 to a third of the row, other ones in each row.
at::Tensor starts_of(std::int64_t positions, unsigned seed) {
  std::mt19937 draw(seed);
  const at::Tensor starts = at::zeros({kRows, positions}, at::kLong);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t begin = 0; begin < positions;) {
      const std::int64_t size = 1 + static_cast<std::int64_t>(draw()) % (positions / 3);
      const std::int64_t end = std::min(positions, begin + size);
      starts[row].narrow(0, begin, end - begin).fill_(begin);
      begin = end;
    }
  }
  return starts;
}

AttentionMask mask_of(const Mask& mask, std::int64_t positions, const at::Tensor& sinks) {
  AttentionMask made{.window = mask.window};
  if (mask.packed) made.begins = starts_of(positions, 7);
  if (mask.sinks) made.sinks = sinks;
  if (mask.both_ways) {
    const at::Tensor flags = at::arange(positions, at::kLong).remainder(19).lt(7);
    made.ends = ends_of_runs(flags.expand({kRows, positions}), {made.begins});
  }
  return made;
}

/// One call with its gradients, of whole rows.
struct Found {
  at::Tensor result, q, k, v, sinks;
};

void expect_same(const Found& found, const Found& expected) {
  EXPECT_TRUE(same_bits(found.result, expected.result)) << "result";
  EXPECT_TRUE(same_bits(found.q, expected.q)) << "q";
  EXPECT_TRUE(same_bits(found.k, expected.k)) << "k";
  EXPECT_TRUE(same_bits(found.v, expected.v)) << "v";
}

/// On one rank, without a cut.
Found plain(const Mask& mask, std::int64_t positions, at::ScalarType dtype = at::kFloat) {
  Tensors t = tensors(positions, dtype);
  for (at::Tensor* one : {&t.q, &t.k, &t.v, &t.sinks}) one->requires_grad_(true);
  const at::Tensor result = context_attention(
      {t.q, t.k, t.v}, 0.3, mask_of(mask, positions, t.sinks), mask.scores, {}, {});
  result.backward(t.result_grad);
  return {result.detach(), t.q.grad(), t.k.grad(), t.v.grad(), t.sinks.grad()};
}

using Exchange = std::function<void(const parallel::ContextSite&, std::vector<at::Tensor>&)>;

/// Over ranks with a cut; joined to whole rows, sinks summed. `changed`: what exchanges do in
/// addition.
Found over_ranks(const Mask& mask, const layout::ContextCut& cut, ContextForm form,
                 const Exchange& changed = {}) {
  Found found;
  std::mutex mutex;
  ranks(cut.ranks).run([&](World& world) {
    std::optional<test_hooks::Set<decltype(test_hooks::context_exchange)>> changes;
    if (changed) changes.emplace(test_hooks::context_exchange, changed);
    const auto mesh = world.mesh(MeshShape({{"ep", cut.ranks}}));
    const ContextRegion region{parallel::axis_of(mesh, "ep"), form, cut.parts()};
    const auto rows = context_rows(cut, region.axis.rank, at::kCPU);
    const Tensors t = tensors(cut.positions);
    const auto own = [&](const at::Tensor& x, std::int64_t dim) {
      return x.index_select(dim, rows->places).requires_grad_(true);
    };
    const at::Tensor q = own(t.q, 2), k = own(t.k, 2), v = own(t.v, 1);
    const at::Tensor sinks = t.sinks.clone().requires_grad_(true);
    const AttentionMask whole = mask_of(mask, cut.positions, sinks);
    const at::Tensor result =
        context_attention({q, k, v}, 0.3, whole, mask.scores, region, {whole.begins, rows});
    result.backward(t.result_grad.index_select(1, rows->places));
    const std::lock_guard lock(mutex);
    const auto join = [&](at::Tensor& all, const at::Tensor& like, const at::Tensor& part,
                          std::int64_t dim) {
      if (!all.defined()) all = at::full_like(like, std::nan(""));
      all.index_copy_(dim, rows->places, part.detach());
    };
    join(found.result, t.result_grad, result, 1);
    join(found.q, t.q, q.grad(), 2);
    join(found.k, t.k, k.grad(), 2);
    join(found.v, t.v, v.grad(), 1);
    if (mask.sinks) {
      found.sinks = found.sinks.defined() ? found.sinks + sinks.grad() : sinks.grad();
    }
  });
  return found;
}

layout::ContextCut whole_cut(std::int64_t positions, int parts) {
  return layout::head_tail(positions, 1, parts);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b).norm() / b.norm()).item<double>();
}

TEST(ContextAttention, SharedRowsHaveTheBitsOfOneRankWithTheSameParts) {
  constexpr std::int64_t kPositions = 8 * 24;
  for (const Mask& mask : masks()) {
    SCOPED_TRACE(mask.name);
    const Found expected = over_ranks(mask, whole_cut(kPositions, 8), ContextForm::kGather);
    for (const int size : {2, 4}) {
      SCOPED_TRACE(size);
      expect_same(over_ranks(mask, layout::head_tail(kPositions, size, 8), ContextForm::kGather),
                  expected);
      std::vector<double> work{1, 7, 2, 6, 5, 3, 8, 4};
      expect_same(over_ranks(mask, layout::by_work(kPositions, size, work), ContextForm::kGather),
                  expected);
    }
  }
}

TEST(ContextAttention, HeadsOfAllPositionsHaveTheBitsOfOneRank) {
  constexpr std::int64_t kPositions = 96;
  for (const Mask& mask : masks()) {
    SCOPED_TRACE(mask.name);
    const Found expected = plain(mask, kPositions);
    for (const int size : {2, 4}) {
      const Found found =
          over_ranks(mask, layout::head_tail(kPositions, size, 8), ContextForm::kHeads);
      expect_same(found, expected);
      if (mask.sinks) EXPECT_TRUE(same_bits(found.sinks, expected.sinks));
    }
  }
}

TEST(ContextAttention, EveryFormIsTheWholeRowInFp64) {
  constexpr std::int64_t kPositions = 96;
  for (const Mask& mask : masks()) {
    SCOPED_TRACE(mask.name);
    const Found truth = plain(mask, kPositions, at::kDouble);
    for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
      const Found found = over_ranks(mask, layout::head_tail(kPositions, 2, 4), form);
      EXPECT_LT(difference(found.result, truth.result), 1e-6);
      EXPECT_LT(difference(found.q, truth.q), 2e-6);
      EXPECT_LT(difference(found.k, truth.k), 2e-6);
      EXPECT_LT(difference(found.v, truth.v), 2e-6);
      if (mask.sinks) EXPECT_LT(difference(found.sinks, truth.sinks), 2e-6);
    }
  }
}

/// In place of the sums of dK and dV, those of the same addends in the order that `order` gives for
/// a rank. Of one call, whose parts all reach from key 0 on.
class OtherOrder {
 public:
  using Order = std::function<std::vector<int>(const layout::ContextCut& cut, int rank)>;
  explicit OtherOrder(Order order) : order_(std::move(order)) {}

  void operator()(const parallel::ContextSite& site, std::vector<at::Tensor>& tensors) {
    const std::lock_guard lock(mutex_);
    if (site.kind == parallel::ContextSite::Kind::kAddends) {
      for (const at::Tensor& one : tensors) addends_[site.part].push_back(one.clone());
    } else if (site.kind == parallel::ContextSite::Kind::kSums) {
      // All ranks have sent all of theirs.
      for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i] = sum(site, tensors[i], i);
    }
  }

 private:
  at::Tensor sum(const parallel::ContextSite& site, const at::Tensor& like, std::size_t which) {
    at::Tensor whole = at::zeros({like.size(0), site.cut.positions, like.size(2)}, like.options());
    for (const int part : order_(site.cut, site.axis.rank)) {
      const at::Tensor& addend = addends_.at(part).at(which);
      whole.narrow(1, 0, addend.size(1)).add_(addend);
    }
    return whole.index_select(1, at::tensor(site.cut.places_of(site.axis.rank), at::kLong));
  }

  const Order order_;
  std::mutex mutex_;
  std::map<int, std::vector<at::Tensor>> addends_;
};

TEST(ContextAttention, AddendsInTheOrderOfTheirArrivalHaveOtherBits) {
  const layout::ContextCut cut = layout::head_tail(8 * 24, 2, 8);
  const Mask& causal = masks().front();
  const auto run = [&](OtherOrder::Order order) {
    OtherOrder sums(std::move(order));
    return over_ranks(causal, cut, ContextForm::kGather, std::ref(sums));
  };
  const Found expected = over_ranks(causal, whole_cut(8 * 24, 8), ContextForm::kGather);
  expect_same(run([](const layout::ContextCut& all, int) {
                std::vector<int> parts(static_cast<std::size_t>(all.parts()));
                std::iota(parts.begin(), parts.end(), 0);
                return parts;
              }),
              expected);
  // A rank has its own addends first.
  const Found found = run([](const layout::ContextCut& all, int rank) {
    std::vector<int> parts = all.parts_of(rank);
    const std::vector<int> others = all.parts_of(1 - rank);
    parts.insert(parts.end(), others.begin(), others.end());
    return parts;
  });
  EXPECT_TRUE(same_bits(found.result, expected.result));
  EXPECT_FALSE(same_bits(found.k, expected.k));
  EXPECT_FALSE(same_bits(found.v, expected.v));
}

/// Notes why what is recorded cannot be replayed.
struct Reasons : grad::Recording {
  void gradient(grad::GradSink& /*sink*/, grad::SlotId /*slot*/,
                const at::Tensor& /*raw*/) override {}
  void deferred(grad::GradSink& /*sink*/, grad::SlotId /*slot*/,
                const grad::Product& /*product*/) override {}
  void keep(const at::Tensor& /*value*/, grad::CheckpointRun /*run*/) override {}
  void refuse(std::string_view why) override { all.emplace_back(why); }
  std::vector<std::string> all;
};

TEST(ContextAttention, ARegionThatHoldsItsExchangesIsNotReplayed) {
  ranks(2).run([](World& world) {
    const auto mesh = world.mesh(MeshShape({{"ep", 2}}));
    const Tensors t = tensors(16);
    for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
      const ContextRegion region{parallel::axis_of(mesh, "ep"), form, 4};
      const auto rows = context_rows(layout::head_tail(32, 2, 4), region.axis.rank, at::kCPU);
      Reasons reasons;
      {
        const grad::RecordingScope recorded(&reasons);
        context_attention({t.q, t.k, t.v}, 0.3, {}, Scores::kOfInputs, region, {{}, rows});
      }
      EXPECT_THAT(reasons.all, ::testing::Contains("attention over ranks of a context region"));
    }
  });
}

TEST(ContextParallelOptions, PartsAndWorkThatDoNotFitAreRefused) {
  ranks(2).run([](World& world) {
    const auto mesh = world.mesh(MeshShape({{"ep", 2}}));
    const auto refused = [&](const ContextOptions& options) {
      return error_of(ErrorKind::kConfig, [&] { ContextParallel(mesh, 16, options); });
    };
    EXPECT_THAT(refused({.axis = "ep", .parts = -4}),
                Says("found -4, expected 0 or a multiple of 4"));
    EXPECT_THAT(refused({.axis = "ep", .parts = 8, .work = {1, 2, 3, 4}}),
                Says("found 4 values, expected one for each of 8 parts"));
    EXPECT_THAT(refused({.axis = "ep", .work = {1, 2, 3, -4}}), Says("found work -4 of part 3"));
    const ContextParallel shared(mesh, 16, {.axis = "ep", .parts = 4, .work = {4, 3, 2, 1}});
    EXPECT_EQ(shared.own_positions(), 8);
  });
}

// Naive: a rank refuses by itself, and the other one waits for it.
TEST(ContextParallelOptions, ARefusalOfOneRankIsThatOfAll) {
  ranks(2).run([](World& world) {
    const auto mesh = world.mesh(MeshShape({{"ep", 2}}));
    const int parts = world.rank() == 0 ? 4 : 8;
    EXPECT_THAT(error_of(ErrorKind::kConfig,
                         [&] { ContextParallel(mesh, 12, {.axis = "ep", .parts = parts}); }),
                Says("found rows of 12 positions, expected a multiple of 8"));
  });
}

// Naive: each cuts as it was told to, and gathered positions stand in a wrong order.
TEST(ContextParallelOptions, RanksWithDifferentWorkAreRefused) {
  ranks(2).run([](World& world) {
    const auto mesh = world.mesh(MeshShape({{"ep", 2}}));
    std::vector<double> work{4, 3, 2, 1};
    if (world.rank() == 1) std::swap(work[0], work[1]);
    EXPECT_THAT(
        error_of(ErrorKind::kUsage,
                 [&] { ContextParallel(mesh, 16, {.axis = "ep", .work = work}); }),
        Says("rank 1 of axis ep cuts 4 parts of 4 over 2 ranks: 1 0 1 0, expected as rank 0 "
             "4 parts of 4 over 2 ranks: 0 1 1 0"));
  });
}

}  // namespace
}  // namespace tessera::nn::context_attention_test
