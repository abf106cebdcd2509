// What attention over ranks that share rows sends and holds, counted in dry runs of one rank of
// many: bytes by closed formulas and by the definition of each mask; what is kept until backward.
#include <numeric>
#include <random>

#include "comm/dry_world.h"
#include "dry/fake_operations.h"
#include "dry/memory_count.h"
#include "layout/context_cut.h"
#include "nn/attention/attention.h"
#include "nn/attention/context_attention.h"
#include "nn/attention/mla.h"
#include "nn/parameter.h"
#include "support/test.h"

namespace tessera::nn::context_counts_test {
namespace {

using layout::ContextCut;
using layout::Range;

constexpr std::int64_t kRows = 2, kGroups = 4, kRepeat = 2, kHeadDim = 8;
/// Numbers that a position has in keys and values.
constexpr std::int64_t kKeysAndValues = 2 * kRows * kGroups * kHeadDim;

/// One rank of a region, whose other ranks do what it does.
class DryRegion {
 public:
  DryRegion(const ContextCut& cut, int rank, ContextForm form)
      : world_(comm::dry_world(
            rank, cut.ranks, {.collective = [this](const auto& one) { sent_ += one.sent_bytes; }})),
        mesh_(world_->mesh(MeshShape({{"ep", cut.ranks}}))),
        region_{parallel::axis_of(mesh_, "ep"), form, cut.parts()},
        rows_(context_rows(cut, rank, at::kCPU)) {
    sent_ = 0;
  }
  const ContextRegion& region() const { return region_; }
  const std::shared_ptr<const ContextRows>& rows() const { return rows_; }
  /// Returns the bytes that the rank has sent since the last call.
  std::int64_t sent() { return std::exchange(sent_, 0); }

 private:
  std::int64_t sent_ = 0;
  std::shared_ptr<World> world_;
  Mesh mesh_;
  const ContextRegion region_;
  const std::shared_ptr<const ContextRows> rows_;
};

struct Bytes {
  std::int64_t forward = 0, backward = 0;
  bool operator==(const Bytes&) const = default;
};
void PrintTo(const Bytes& bytes, std::ostream* out) {
  *out << bytes.forward << " B in forward, " << bytes.backward << " B in backward";
}

/// The bytes that a rank sends for one attention.
Bytes sent_of(const ContextCut& cut, int rank, ContextForm form, const AttentionMask& mask,
              at::ScalarType dtype = at::kFloat) {
  const dry::FakeScope no_values;
  DryRegion dry(cut, rank, form);
  const std::int64_t own = cut.positions_of_rank();
  const auto made = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, at::TensorOptions(dtype)).requires_grad_(true);
  };
  const AttentionHeads heads{made({kRows, kGroups, own, kRepeat, kHeadDim}),
                             made({kRows, kGroups, own, 1, kHeadDim}),
                             made({kRows, own, kGroups * kHeadDim})};
  const at::Tensor result = context_attention(heads, 0.3, mask, Scores::kOfInputs, dry.region(),
                                              {mask.begins, dry.rows()});
  Bytes bytes{.forward = dry.sent()};
  result.backward(at::empty_like(result));
  bytes.backward = dry.sent();
  return bytes;
}

/// Documents that begin at these positions, in all rows.
at::Tensor documents_at(const std::vector<std::int64_t>& begins, std::int64_t positions) {
  at::Tensor starts = at::zeros({kRows, positions}, at::kLong);
  for (const std::int64_t begin : begins) {
    starts.narrow(1, begin, positions - begin).fill_(begin);
  }
  return starts;
}

/// The same bytes by the definition of the mask: of each part the keys that any of its queries
/// sees, from a multiple of 32 on (kernels begin there) to the last one.
Bytes by_definition(const ContextCut& cut, int rank, const AttentionMask& mask,
                    std::int64_t bytes_of_element) {
  const std::int64_t window = mask.window.value_or(cut.positions);
  std::vector<Range> reach;
  for (int number = 0; number < cut.parts(); ++number) {
    Range seen{cut.positions, 0};
    for (std::int64_t i = cut.part(number).begin; i < cut.part(number).end; ++i) {
      for (std::int64_t row = 0; row < kRows; ++row) {
        const std::int64_t start =
            mask.begins.defined() ? mask.begins[row][i].item<std::int64_t>() : 0;
        seen.begin = std::min(seen.begin, std::max(start, i - window + 1));
      }
      seen.end = i + 1;
    }
    reach.push_back({seen.begin / 32 * 32, seen.end});
  }
  std::vector<int> owner_of(static_cast<std::size_t>(cut.positions));
  for (int number = 0; number < cut.parts(); ++number) {
    const Range part = cut.part(number);
    std::fill(owner_of.begin() + part.begin, owner_of.begin() + part.end,
              cut.owner[static_cast<std::size_t>(number)]);
  }
  const auto is_reached_by = [&](std::int64_t key, int other) {
    return std::ranges::any_of(cut.parts_of(other), [&](int part) {
      const Range& keys = reach[static_cast<std::size_t>(part)];
      return keys.begin <= key && key < keys.end;
    });
  };
  std::int64_t gathered = 0, partials = 0;
  for (std::int64_t key = 0; key < cut.positions; ++key) {
    const int owner = owner_of[static_cast<std::size_t>(key)];
    for (int other = 0; other < cut.ranks; ++other) {
      if (owner == rank && other != rank && is_reached_by(key, other)) ++gathered;
    }
    if (owner == rank) continue;
    for (const int part : cut.parts_of(rank)) {
      const Range& keys = reach[static_cast<std::size_t>(part)];
      if (keys.begin <= key && key < keys.end) ++partials;
    }
  }
  const std::int64_t once = gathered * kKeysAndValues * bytes_of_element;
  return {once, once + partials * kKeysAndValues * 4};
}

TEST(ContextCounts, GatherSendsWhatACausalMaskReaches) {
  constexpr std::int64_t kPart = 32;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (const int ranks : {2, 4}) {
      const ContextCut cut = layout::head_tail(2 * ranks * kPart, ranks, 2 * ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        // Its head is reached by all others, its tail by those whose own tail lies behind it.
        const std::int64_t gathered = kPart * (ranks - 1 + rank) * kKeysAndValues * bytes;
        // T (1 - 1/N) rows on every rank: those of a reduce-scatter.
        const std::int64_t partials = cut.positions / ranks * (ranks - 1) * kKeysAndValues * 4;
        EXPECT_EQ(sent_of(cut, rank, ContextForm::kGather, {}, dtype),
                  (Bytes{gathered, gathered + partials}))
            << "rank " << rank << " of " << ranks;
      }
    }
  }
}

TEST(ContextCounts, GatherSendsOnlyWhatTheMaskOfWholeRowsReaches) {
  constexpr std::int64_t kPositions = 256;
  std::vector<AttentionMask> masks{{}, {.window = 40}};
  masks.push_back({.begins = documents_at({50, 70, 150, 200}, kPositions)});
  masks.push_back({.window = 30, .begins = documents_at({128, 190}, kPositions)});
  at::Tensor other_rows = documents_at({100}, kPositions);
  other_rows[1].fill_(0);
  masks.push_back({.begins = other_rows});
  std::mt19937 draw(20261130);
  for (const int ranks : {2, 4}) {
    std::vector<double> work(static_cast<std::size_t>(2 * ranks));
    for (double& one : work) one = static_cast<double>(draw() % 100);
    for (const ContextCut& cut : {layout::head_tail(kPositions, ranks, 2 * ranks),
                                  layout::by_work(kPositions, ranks, work)}) {
      for (std::size_t i = 0; i < masks.size(); ++i) {
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(sent_of(cut, rank, ContextForm::kGather, masks[i]),
                    by_definition(cut, rank, masks[i], 4))
              << "mask " << i << ", rank " << rank << " of " << layout::to_string(cut);
        }
      }
    }
  }
}

TEST(ContextCounts, DocumentsWithinPartsSendNothing) {
  const ContextCut cut = layout::head_tail(256, 2, 4);
  const AttentionMask mask{.begins = documents_at({64, 128, 160, 192}, 256)};
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(sent_of(cut, rank, ContextForm::kGather, mask), Bytes());
  }
}

TEST(ContextCounts, HeadsSendTheSameForEveryMask) {
  for (const int ranks : {2, 4}) {
    const ContextCut cut = layout::head_tail(256, ranks, 2 * ranks);
    // (2 H + 2 G) B (T/N) D e (1 - 1/N).
    const std::int64_t bytes = (2 * kGroups * kRepeat + 2 * kGroups) * kRows * 256 / ranks *
                               kHeadDim * 4 / ranks * (ranks - 1);
    for (const AttentionMask& mask : {AttentionMask(), AttentionMask{.window = 40},
                                      AttentionMask{.begins = documents_at({64, 128}, 256)}}) {
      EXPECT_EQ(sent_of(cut, ranks - 1, ContextForm::kHeads, mask), (Bytes{bytes, bytes}));
    }
  }
}

/// Long rows, so that what does not depend on their length is nothing; of several, which share one
/// table of rope.
constexpr std::int64_t kLong = 4096, kLongRows = 8;
constexpr std::int64_t kOfPosition = kLongRows * kLong * 4;  ///< bytes of a number a position

/// A layer of a rank, stepped once.
struct Held {
  double kept = 0;       ///< from its forward to its backward, result included
  double meanwhile = 0;  ///< the most in its forward in addition to what it keeps
};

template <class Layer, class Options>
Held held_by(Options options, std::int64_t turned, const ContextCut& cut, ContextForm form) {
  const dry::FakeScope no_values;
  DryRegion dry(cut, 0, form);
  options.context = dry.region();
  Layer layer(options, std::make_shared<Rope>(RopeOptions{}, turned));
  materialize(layer);
  const at::Tensor x =
      at::empty({kLongRows, cut.positions_of_rank(), options.hidden_size}).requires_grad_(true);
  layer.forward(x, {{}, dry.rows()});  // makes the rope's table
  const dry::MemoryCount count;
  const at::Tensor result = layer.forward(x, {{}, dry.rows()});
  const auto kept = static_cast<double>(count.now());
  return {kept, static_cast<double>(count.peak()) - kept};
}

ContextCut cut_of(int ranks) { return layout::head_tail(kLong, ranks, 8); }

constexpr std::int64_t kNumbersOfKeys = 2 * kGroups * kHeadDim;  ///< and values, of a position

AttentionOptions attention() {
  return {.hidden_size = 64, .heads = kGroups * kRepeat, .kv_heads = kGroups, .head_dim = kHeadDim};
}

TEST(ContextCounts, AttentionKeepsItsShareOfTheRow) {
  AttentionOptions wide = attention();
  wide.window = 128;
  wide.sinks = AttentionOptions::Sinks::kYes;
  for (const AttentionOptions& options : {attention(), wide}) {
    for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
      const Held alone = held_by<Attention>(options, kHeadDim, cut_of(1), form);
      for (const int ranks : {2, 4}) {
        const Held one = held_by<Attention>(options, kHeadDim, cut_of(ranks), form);
        EXPECT_NEAR(one.kept, alone.kept / ranks, 0.01 * alone.kept / ranks) << ranks;
      }
    }
  }
}

// Own keys and values in the order of positions, those of whole rows, and messages both ways, in
// the place of all keys and values on one rank.
TEST(ContextCounts, GatherHoldsKeysAndValuesOfWholeRowsWhileItRuns) {
  constexpr double kWhole = kNumbersOfKeys * kOfPosition;
  const Held alone = held_by<Attention>(attention(), kHeadDim, cut_of(1), ContextForm::kGather);
  for (const int ranks : {2, 4}) {
    const Held one = held_by<Attention>(attention(), kHeadDim, cut_of(ranks), ContextForm::kGather);
    const double own = kWhole / ranks, others = kWhole - own;
    const double sent = others / 2;  // its head, to each other rank
    EXPECT_LE(one.meanwhile, alone.meanwhile - kWhole + own + kWhole + sent + others);
    EXPECT_GT(one.meanwhile, kWhole);
  }
}

// The latents of whole rows, and the keys and values made of them, stay for backward.
TEST(ContextCounts, LatentAttentionKeepsItsShareAndInGatherWholeKeysAndValues) {
  const MlaOptions options{.hidden_size = 64,
                           .heads = 8,
                           .kv_lora_rank = 16,
                           .qk_nope_head_dim = 8,
                           .qk_rope_head_dim = 4,
                           .v_head_dim = 8,
                           .scale = 0.3};
  constexpr double kWhole = (16 + 4 + 8 * (8 + 4) + 8 * 8) * kOfPosition;
  for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
    const Held alone = held_by<Mla>(options, 4, cut_of(1), form);
    for (const int ranks : {2, 4}) {
      const Held one = held_by<Mla>(options, 4, cut_of(ranks), form);
      const double more = form == ContextForm::kGather ? kWhole * (ranks - 1) / ranks : 0.0;
      const double expected = alone.kept / ranks + more;
      EXPECT_NEAR(one.kept, expected, 0.01 * expected) << ranks;
    }
  }
}

}  // namespace
}  // namespace tessera::nn::context_counts_test
