// The work of parts of rows against masks that are written out pair by pair, for documents, windows
// and chunks; and how equally cuts by that work share packed rows.
#include "models/context/context_work.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>
#include <numeric>
#include <random>

#include "support/test.h"
#include "unit/models/small_spec.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::models::context_work_test {
namespace {

using nn::packed::Lengths;

constexpr double kDims = 2 * 16;  // of small(): queries with keys, weights with values

/// One layer, as its mask is: 0 = no window, no chunks.
struct MaskCase {
  std::int64_t window = 0, chunk = 0;
};

ModelSpec spec_of(const std::vector<MaskCase>& layers) {
  ModelSpec spec = small();
  spec.num_hidden_layers = std::ssize(layers);
  for (const auto& [window, chunk] : layers) {
    spec.layer_types.push_back(window > 0  ? LayerType::kSliding
                               : chunk > 0 ? LayerType::kChunked
                                           : LayerType::kFull);
    if (window > 0) spec.sliding_window = window;
    if (chunk > 0) spec.chunked = ChunkedSpec{.attention_chunk_size = chunk};
  }
  return spec;
}

/// Whether query i of a document that begins at `start` sees key j.
bool sees(const MaskCase& mask, std::int64_t start, std::int64_t i, std::int64_t j) {
  if (j > i || j < start) return false;
  if (mask.window > 0 && i - j >= mask.window) return false;
  return mask.chunk == 0 || (i - start) / mask.chunk == (j - start) / mask.chunk;
}

/// Rows of drawn documents whose lengths are multiples of `unit`; none = rows are not packed.
struct Rows {
  std::int64_t count = 1, positions = 0;
  at::Tensor starts = {};
  std::int64_t start_of(std::int64_t row, std::int64_t place) const {
    return starts.defined() ? starts[row][place].item<std::int64_t>() : 0;
  }
};

Rows drawn_rows(std::mt19937_64& random, std::int64_t positions, std::int64_t unit) {
  Rows rows{.count = 1 + static_cast<std::int64_t>(random() % 2), .positions = positions};
  if (random() % 3 == 0) return rows;
  auto lengths = nn::packed::drawn_rows(random, rows.count, positions / unit);
  for (Lengths& row : lengths) {
    for (std::int64_t& length : row) length *= unit;
  }
  rows.starts = nn::packed::documents_of(lengths).starts;
  return rows;
}

MaskCase drawn_mask(std::mt19937_64& random, std::int64_t unit) {
  const auto some = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
  };
  const auto kind = random() % 3;
  return kind == 0 ? MaskCase{} : kind == 1 ? MaskCase{some(200), 0} : MaskCase{0, some(4) * unit};
}

std::string text_of(const MaskCase& mask, const Rows& rows, int parts) {
  return concat("window ", mask.window, ", chunk ", mask.chunk, ", rows ", rows.count, ", T ",
                rows.positions, ", parts ", parts, rows.starts.defined() ? ", packed" : "");
}

// Parts of one position are blocks of one query. Borders stand where blocks of keys begin, so that
// no hidden key is computed.
TEST(ContextWork, OfSinglePositionsIsThePairsThatAreSeen) {
  std::mt19937_64 random(1);
  for (int drawn = 0; drawn < 30; ++drawn) {
    const Rows rows = drawn_rows(random, 192, 32);
    const MaskCase mask = drawn_mask(random, 32);
    std::vector<double> pairs(192, 0.0);
    for (std::int64_t row = 0; row < rows.count; ++row) {
      for (std::int64_t i = 0; i < rows.positions; ++i) {
        const std::int64_t start = rows.start_of(row, i);
        for (std::int64_t j = 0; j <= i; ++j) {
          if (sees(mask, start, i, j)) pairs.at(static_cast<std::size_t>(i)) += kDims;
        }
      }
    }
    EXPECT_EQ(context_work(spec_of({mask}), 192, rows.count, 192, rows.starts), pairs)
        << text_of(mask, rows, 192);
  }
}

/// The pairs of blocks of 64 queries with all keys from the first that one of them sees, taken down
/// to a multiple of `unit`, to the block's end.
double pairs_of_blocks(const MaskCase& mask, const Rows& rows, const layout::Range& part,
                       std::int64_t unit) {
  double pairs = 0.0;
  for (std::int64_t row = 0; row < rows.count; ++row) {
    for (std::int64_t begin = part.begin; begin < part.end; begin += 64) {
      const std::int64_t end = std::min(part.end, begin + 64);
      std::int64_t first = end;
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t start = rows.start_of(row, i);
        std::int64_t j = 0;
        while (!sees(mask, start, i, j)) ++j;
        first = std::min(first, j);
      }
      pairs += static_cast<double>((end - begin) * (end - first / unit * unit));
    }
  }
  return pairs;
}

// Kernels take no more than 31 hidden keys in front of those that a block sees.
TEST(ContextWork, IsThatOfBlocksOfQueriesWithTheKeysThatTheySee) {
  std::mt19937_64 random(2);
  for (int drawn = 0; drawn < 60; ++drawn) {
    const auto size = std::vector<std::int64_t>{7, 40, 64, 96, 128}[random() % 5];
    const int parts = 1 + static_cast<int>(random() % 3);
    const Rows rows = drawn_rows(random, size * parts, 1);
    const MaskCase mask = drawn_mask(random, 23);
    const auto work = context_work(spec_of({mask}), rows.positions, rows.count, parts, rows.starts);
    ASSERT_EQ(std::ssize(work), parts);
    const bool is_exact = !rows.starts.defined() && mask.chunk == 0;
    for (int number = 0; number < parts; ++number) {
      const layout::Range part{number * size, (number + 1) * size};
      const double found = work.at(static_cast<std::size_t>(number)) / kDims;
      EXPECT_GE(found, pairs_of_blocks(mask, rows, part, 1)) << text_of(mask, rows, parts);
      EXPECT_LE(found, pairs_of_blocks(mask, rows, part, is_exact ? 1 : 32))
          << text_of(mask, rows, parts);
    }
  }
}

std::vector<double> sum_of(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> sum;
  std::ranges::transform(a, b, std::back_inserter(sum), std::plus<>());
  return sum;
}

TEST(ContextWork, LayersOfSeveralKindsAddUp) {
  std::mt19937_64 random(3);
  const at::Tensor starts = nn::packed::documents_of(nn::packed::drawn_rows(random, 2, 512)).starts;
  const auto of = [&](const std::vector<MaskCase>& layers) {
    return context_work(spec_of(layers), 512, 2, 4, starts);
  };
  const MaskCase full, sliding{.window = 50}, chunks{.chunk = 96};
  EXPECT_EQ(of({sliding, full}), sum_of(of({sliding}), of({full})));
  EXPECT_EQ(of({full, chunks, chunks}), sum_of(of({full}), of({chunks, chunks})));
  EXPECT_EQ(of({chunks, chunks}), sum_of(of({chunks}), of({chunks})));
  EXPECT_NE(of({sliding, full}), of({full, full}));
}

// Full layers of Gemma 4 have other heads than sliding ones; its layer types are its own.
TEST(ContextWork, LayersOfGemma4CountTheirOwnWindowsAndDims) {
  ModelSpec spec = small(Family::kGemma4);
  spec.gemma4.emplace().sliding_window = 50;
  spec.gemma4->layers = {{.type = LayerType::kSliding, .head_dim = 16},
                         {.type = LayerType::kFull, .head_dim = 64}};
  const auto full = context_work(spec_of({{}}), 256, 1, 2, {});
  const auto sliding = context_work(spec_of({{.window = 50}}), 256, 1, 2, {});
  EXPECT_EQ(context_work(spec, 256, 1, 2, {}), sum_of(sliding, {4 * full.at(0), 4 * full.at(1)}));
}

TEST(ContextWork, LayersThatSeeNothingOrHaveAStateCountNothing) {
  ModelSpec spec = spec_of({{}, {}, {}, {}});
  spec.layer_types = {LayerType::kMlp, LayerType::kFull, LayerType::kLinear, LayerType::kExperts};
  EXPECT_EQ(context_work(spec, 256, 1, 2, {}), context_work(spec_of({{}}), 256, 1, 2, {}));
  spec.layer_types.assign(4, LayerType::kMlp);
  EXPECT_EQ(context_work(spec, 256, 1, 2, {}), std::vector({0.0, 0.0}));
}

TEST(ContextWork, RowsAddUp) {
  const ModelSpec spec = spec_of({{}, {.window = 50}});
  const auto one = context_work(spec, 256, 1, 2, {});
  EXPECT_EQ(context_work(spec, 256, 2, 2, {}), sum_of(one, one));
  EXPECT_EQ(context_work(spec, 256, 2, 2, at::zeros({2, 256}, at::kLong)), sum_of(one, one));
  EXPECT_EQ(context_work(spec, 256, 0, 2, {}), std::vector({0.0, 0.0}));
  EXPECT_EQ(context_work(spec, 256, 0, 2, at::zeros({0, 256}, at::kLong)), std::vector({0.0, 0.0}));
  EXPECT_EQ(context_work(spec, 0, 1, 2, {}), std::vector({0.0, 0.0}));
}

// ---------------------------------------------------------------------------------------------- cuts

/// Returns what the most loaded rank has, of the mean.
double slowest_over_mean(const layout::ContextCut& cut, const std::vector<double>& work) {
  std::vector<double> loads(static_cast<std::size_t>(cut.ranks), 0.0);
  for (std::size_t part = 0; part < work.size(); ++part) {
    loads.at(static_cast<std::size_t>(cut.owner.at(part))) += work[part];
  }
  return *std::ranges::max_element(loads) * cut.ranks /
         std::accumulate(loads.begin(), loads.end(), 0.0);
}

/// Deals parts by falling work to ranks in turn, there and back.
layout::ContextCut snake(std::int64_t positions, int ranks, const std::vector<double>& work) {
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](std::size_t part) { return work[part]; });
  layout::ContextCut cut{ranks, positions, std::vector<int>(work.size())};
  for (std::size_t i = 0; i < order.size(); ++i) {
    const int turn = static_cast<int>(i) % (2 * ranks);
    cut.owner.at(order[i]) = std::min(turn, 2 * ranks - 1 - turn);
  }
  return cut;
}

enum class Packing { kLogNormal, kOneLong, kUniform };

/// [1, positions] of a row that drawn documents fill: lengths with a median of 403 and some of many
/// thousands, one of 0.45 of the row among short ones, or uniform ones up to a quarter of the row.
at::Tensor drawn_starts(Packing packing, std::int64_t positions, std::mt19937_64& random) {
  const auto uniform = [&] { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; };
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return static_cast<double>(least) + uniform() * static_cast<double>(most - least);
  };
  const auto length = [&] {
    if (packing == Packing::kOneLong) return between(64, 512);
    if (packing == Packing::kUniform) return between(64, positions / 4);
    const double normal =
        std::sqrt(-2.0 * std::log(uniform())) * std::cos(2.0 * std::numbers::pi * uniform());
    return 403.0 * std::exp(normal);
  };
  const std::int64_t long_one = packing == Packing::kOneLong ? positions * 45 / 100 : 0;
  Lengths lengths;
  for (std::int64_t left = positions - long_one; left > 0; left -= lengths.back()) {
    lengths.push_back(std::clamp<std::int64_t>(static_cast<std::int64_t>(length()), 1, left));
  }
  const auto place = static_cast<std::ptrdiff_t>(random() % lengths.size());
  if (long_one > 0) lengths.insert(lengths.begin() + place, long_one);
  return nn::packed::documents_of({lengths}).starts;
}

struct Worst {
  double by_work = 1.0, snake = 1.0, head_tail = 1.0;
};

Worst worst_of_rows(Packing packing, std::int64_t positions, int ranks) {
  std::mt19937_64 random(11);
  Worst worst;
  const ModelSpec spec = spec_of({{}});
  const int parts = 8 * ranks;
  for (int drawn = 0; drawn < 20; ++drawn) {
    const at::Tensor starts = drawn_starts(packing, positions, random);
    const auto work = context_work(spec, positions, 1, parts, starts);
    const auto take = [&](double& most, const layout::ContextCut& cut) {
      most = std::max(most, slowest_over_mean(cut, work));
    };
    take(worst.by_work, context_cut(spec, ranks, parts, positions, starts));
    take(worst.snake, snake(positions, ranks, work));
    take(worst.head_tail, layout::head_tail(positions, ranks, parts));
  }
  return worst;
}

// With 8 parts a rank, counted in pairs. What is not cut by work is further off.
TEST(ContextCutOfRows, PackedRowsAreSharedWithinOneTwentieth) {
  for (const std::int64_t positions : {8192, 32768}) {
    for (const int ranks : {2, 4, 8}) {
      for (const Packing packing : {Packing::kLogNormal, Packing::kOneLong, Packing::kUniform}) {
        const Worst worst = worst_of_rows(packing, positions, ranks);
        const std::string what =
            concat("T ", positions, ", ranks ", ranks, ", packing ", static_cast<int>(packing));
        EXPECT_LE(worst.by_work, 1.05) << what;
        EXPECT_LT(worst.by_work, worst.snake) << what;
        EXPECT_GT(worst.head_tail, 1.15) << what;
      }
    }
  }
}

// Head and tail of a causal mask have equal work, in any number of parts.
TEST(ContextCutOfRows, RowsOfOneDocumentAreSharedExactly) {
  const ModelSpec spec = spec_of({{}});
  for (const int parts : {4, 8, 32}) {
    const auto work = context_work(spec, 4096, 3, parts, {});
    EXPECT_EQ(slowest_over_mean(context_cut(spec, 2, parts, 4096, {}), work), 1.0) << parts;
  }
}

// A cut by one kind of layers would share the others' work badly.
TEST(ContextCutOfRows, AllLayersCount) {
  std::mt19937_64 random(5);
  const MaskCase full, sliding{.window = 256};
  const std::vector<MaskCase> layers{full, sliding, sliding, sliding, sliding};
  const at::Tensor starts = drawn_starts(Packing::kLogNormal, 8192, random);
  const auto work = context_work(spec_of(layers), 8192, 1, 16, starts);
  const auto shared_by = [&](const std::vector<MaskCase>& seen) {
    return slowest_over_mean(context_cut(spec_of(seen), 2, 16, 8192, starts), work);
  };
  EXPECT_LE(shared_by(layers), 1.01);
  EXPECT_GT(shared_by({full}), 1.01);
  EXPECT_GT(shared_by({sliding}), 1.01);
}

// ----------------------------------------------------------------------------------------- the choice

TEST(ContextCutOfRows, IsByWorkWhereRowsArePackedInMoreThanTwoPartsARank) {
  std::mt19937_64 random(7);
  const ModelSpec spec = spec_of({{}});
  const at::Tensor starts = nn::packed::documents_of(nn::packed::drawn_rows(random, 3, 640)).starts;
  const auto work = context_work(spec, 640, 3, 8, starts);
  const layout::ContextCut head_tail = layout::head_tail(640, 2, 8);
  ASSERT_NE(layout::by_work(640, 2, work), head_tail);
  EXPECT_EQ(context_cut(spec, 2, 8, 640, starts), layout::by_work(640, 2, work));
  EXPECT_EQ(context_cut(spec, 2, 8, 640, {}), head_tail);
  EXPECT_EQ(context_cut(spec, 2, 4, 640, starts), layout::head_tail(640, 2, 4));
  EXPECT_EQ(context_cut(spec, 1, 8, 640, starts), layout::head_tail(640, 1, 8));
  const at::Tensor unreadable = at::empty({3, 640}, at::TensorOptions(at::kLong).device(at::kMeta));
  EXPECT_EQ(context_cut(spec, 2, 8, 640, unreadable), head_tail);
}

TEST(ContextCutOfRows, LengthsThatDoNotGoAreRefusedBeforeTheWorkIsCounted) {
  const at::Tensor starts = at::zeros({1, 100}, at::kLong);
  EXPECT_REFUSED(kConfig, context_cut(spec_of({{}}), 2, 16, 100, starts), "take 96 or 112");
  EXPECT_REFUSED(kConfig, context_cut(spec_of({{}}), 2, 16, 100, {}), "take 96 or 112");
  EXPECT_REFUSED(kConfig, context_cut(spec_of({{}}), 2, 5, 100, starts), "found 5 parts");
}

}  // namespace
}  // namespace tessera::models::context_work_test
