// Local parts: over all ranks every element of every tensor of the file is held once (as often as
// there are ranks that hold the same), and every piece says truly where its elements lie.

#include "layout/local_part.h"

#include <numeric>
#include <random>

#include "layout/range.h"
#include "support/test.h"

namespace tessera::layout::local_part_test {
namespace {

using Shape = std::vector<std::int64_t>;

AxisPlacement shard(const char* axis, int size, int dim) {
  return {axis, size, {PlacementKind::kShard, dim}, {PlacementKind::kShard, dim}};
}
AxisPlacement partial(const char* axis, int size) {
  return {axis, size, {PlacementKind::kReplicate}, {PlacementKind::kPartial}};
}
AxisPlacement invariant(const char* axis, int size) {
  return {axis, size, {PlacementKind::kInvariant}, {PlacementKind::kInvariant}};
}

std::int64_t numel(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// The elements of the local tensor as numbers of the global one, by indexing alone.
std::vector<std::int64_t> local_elements(const std::vector<TensorBox>& boxes, const Shape& cut) {
  std::vector<std::int64_t> elements;
  for (const TensorBox& box : boxes) {
    for (std::int64_t i = 0; i < box.numel(); ++i) {
      elements.push_back(position_in_tensor(box, cut, i));
    }
  }
  return elements;
}

struct Case {
  ParameterLayout layout;
  Shape shape;
  FileShape file;
  int copies = 1;  ///< ranks that hold the same element
};

/// Every rank's coordinates, row-major over the axes.
std::vector<std::vector<int>> all_coordinates(const ParameterLayout& layout) {
  std::vector<std::vector<int>> all{{}};
  for (const AxisPlacement& axis : layout.axes) {
    std::vector<std::vector<int>> next;
    for (const auto& begun : all) {
      for (int i = 0; i < axis.size; ++i) {
        next.push_back(begun);
        next.back().push_back(i);
      }
    }
    all = std::move(next);
  }
  return all;
}

std::int64_t local_numel(const Case& one, const std::vector<int>& at) {
  std::int64_t sum = 0;
  for (const TensorBox& box : local_boxes(one.layout, one.shape, at)) sum += box.numel();
  return sum;
}

/// Checks one rank's pieces of `range` against indexing; counts what they hold.
void check_rank(const Case& one, const std::vector<int>& at, Range range, std::vector<int>& seen) {
  const Shape& global = sharded_shape(one.layout, one.shape);
  const auto expected = local_elements(local_boxes(one.layout, one.shape, at), global);
  const std::int64_t each = numel(one.file.shape);
  std::int64_t next = range.begin;
  for (const Piece& piece : pieces(one.layout, one.shape, one.file, at, range)) {
    ASSERT_EQ(piece.local.begin, next) << "pieces follow one another";
    ASSERT_EQ(piece.local.size(), piece.in_box.size());
    for (std::int64_t i = 0; i < piece.local.size(); ++i) {
      const std::int64_t in_tensor =
          position_in_tensor(piece.box, one.file.shape, piece.in_box.begin + i);
      const std::int64_t element = static_cast<std::int64_t>(piece.tensor) * each + in_tensor;
      ASSERT_EQ(element, expected[static_cast<std::size_t>(piece.local.begin + i)]);
      ++seen[static_cast<std::size_t>(element)];
    }
    next = piece.local.end;
  }
  EXPECT_EQ(next, range.end);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::vector<AxisPlacement> axes, Shape shape, Shape cut_as = {},
                       FileShape file = {}, int copies = 1) {
    if (file.shape.empty()) file = {1, shape};
    all.push_back({{MeshKind::kDense, std::move(cut_as), std::move(axes)},
                   std::move(shape),
                   std::move(file),
                   copies});
  };
  add({}, {7});
  add({shard("tp", 2, 0)}, {8, 3});
  add({shard("tp", 4, 1)}, {3, 8});
  add({shard("tp", 2, 0)}, {6});
  add({partial("tp", 2)}, {5, 2}, {}, {}, 2);
  add({invariant("tp", 3)}, {4}, {}, {}, 3);
  add({shard("tp_kv/2", 2, 0), partial("tp_rep/2", 2)}, {4, 3}, {}, {}, 2);
  // Experts, whole in the file: gate and up in one, cut over experts and over both halves.
  add({shard("ep", 2, 0)}, {4, 6, 5});
  add({shard("ep", 2, 0), shard("etp", 3, 2)}, {4, 12, 5}, {4, 2, 6, 5});
  add({shard("etp", 2, 2)}, {2, 8, 3}, {2, 2, 4, 3});
  add({shard("ep", 2, 0), shard("etp", 2, 2)}, {4, 3, 8});
  // The same transposed: columns of gate, then columns of up, in each row of the file.
  add({shard("etp", 2, 3)}, {2, 3, 8}, {2, 3, 2, 4});
  add({shard("ep", 2, 0), shard("etp", 2, 3)}, {4, 3, 8}, {4, 3, 2, 4});
  // One tensor an expert in the file.
  add({shard("ep", 2, 0)}, {4, 6, 5}, {4, 2, 3, 5}, {8, {3, 5}});
  add({shard("ep", 2, 0), shard("etp", 3, 2)}, {4, 6, 5}, {4, 2, 3, 5}, {8, {3, 5}});
  add({shard("ep", 2, 0), shard("etp", 2, 2)}, {4, 5, 6}, {}, {4, {5, 6}});
  // Two axes along one dim.
  add({shard("ep", 2, 0), shard("tp", 2, 0)}, {8, 3});
  // Queries, keys and values one behind the other, each cut by itself; a bias; two axes.
  const auto add_sections = [&](std::vector<AxisPlacement> axes, Shape shape, Shape sections) {
    add(std::move(axes), std::move(shape));
    all.back().layout.sections = std::move(sections);
  };
  add_sections({shard("tp", 2, 0)}, {16, 3}, {8, 4, 4});
  add_sections({shard("tp", 4, 0)}, {16}, {8, 4, 4});
  add_sections({shard("tp", 3, 0)}, {12, 2}, {6, 6});
  add_sections({shard("ep", 2, 0), shard("tp", 2, 0)}, {16, 2}, {8, 4, 4});
  add_sections({shard("tp", 2, 1)}, {6, 4}, {4, 2});
  add_sections({partial("tp", 2)}, {6, 4}, {4, 2});
  all.back().copies = 2;
  return all;
}

TEST(LocalPart, PiecesOfAllRanksHoldEveryElementOnce) {
  for (const Case& one : cases()) {
    validate(one.layout, one.shape, "w");
    std::vector<int> seen(static_cast<std::size_t>(numel(one.shape)), 0);
    for (const auto& at : all_coordinates(one.layout)) {
      const std::int64_t own = local_numel(one, at);
      EXPECT_EQ(numel(local_shape(one.layout, one.shape)), own);
      check_rank(one, at, {0, own}, seen);
    }
    for (const int times : seen) ASSERT_EQ(times, one.copies);
  }
}

TEST(LocalPart, PiecesOfSlicesAreThoseOfTheWhole) {
  for (const Case& one : cases()) {
    std::vector<int> seen(static_cast<std::size_t>(numel(one.shape)), 0);
    for (const auto& at : all_coordinates(one.layout)) {
      const std::int64_t own = local_numel(one, at);
      for (std::int64_t begin = 0; begin < own; begin += 7) {
        check_rank(one, at, {begin, std::min<std::int64_t>(begin + 7, own)}, seen);
      }
    }
    for (const int times : seen) ASSERT_EQ(times, one.copies);
  }
}

TEST(LocalPart, LocalShapesFoldWhatTheCutShapeSplits) {
  const ParameterLayout layout{
      MeshKind::kSparse, {4, 2, 6, 5}, {shard("ep", 2, 0), shard("etp", 3, 2)}};
  EXPECT_EQ(local_shape(layout, {4, 12, 5}), (Shape{2, 4, 5}));
  EXPECT_EQ(local_shape({}, {3, 1, 4}), (Shape{3, 1, 4}));
}

/// Sections of random sizes over random ranks: what a rank holds is its share of each, in order.
TEST(LocalPart, RandomSectionsAreSharedOutEachByItself) {
  std::mt19937_64 random(20261130);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 4);
    Case one{
        {MeshKind::kDense, {}, {shard("tp", ranks, 0)}}, {0, 1 + std::int64_t(random() % 3)}, {}};
    for (std::uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      one.layout.sections.push_back(ranks * (1 + static_cast<std::int64_t>(random() % 3)));
      one.shape[0] += one.layout.sections.back();
    }
    one.file = {1, one.shape};
    validate(one.layout, one.shape, "w");
    std::vector<int> seen(static_cast<std::size_t>(numel(one.shape)), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<std::int64_t> rows;  // by the definition
      std::int64_t begin = 0;
      for (const std::int64_t section : one.layout.sections) {
        for (std::int64_t i = 0; i < section / ranks; ++i) {
          rows.push_back(begin + rank * (section / ranks) + i);
        }
        begin += section;
      }
      const auto elements = local_elements(local_boxes(one.layout, one.shape, {rank}), one.shape);
      ASSERT_EQ(elements.size(), rows.size() * static_cast<std::size_t>(one.shape[1]));
      for (std::size_t i = 0; i < elements.size(); ++i) {
        ASSERT_EQ(elements[i] / one.shape[1], rows[i / static_cast<std::size_t>(one.shape[1])]);
      }
      const std::int64_t own = local_numel(one, {rank});
      const auto local = local_shape(one.layout, one.shape);
      EXPECT_EQ(numel(local), own);
      EXPECT_EQ(global_shape(one.layout, local, "w"), one.shape);
      const auto middle = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(own + 1));
      check_rank(one, {rank}, {0, middle}, seen);
      check_rank(one, {rank}, {middle, own}, seen);
    }
    for (const int times : seen) ASSERT_EQ(times, 1);
  }
}

TEST(LocalPart, SectionsThatDoNotFitAreRefused) {
  const auto refuses = [](const Shape& sections, const Shape& shape, Shape folded = {}) {
    const ParameterLayout layout{
        MeshKind::kDense, std::move(folded), {shard("tp", 2, 0)}, sections};
    EXPECT_THROW(validate(layout, shape, "w"), Error);
  };
  refuses({4, 2}, {8, 3});  // not all rows
  refuses({3, 5}, {8, 3});  // 3 rows over 2 ranks
  refuses({4, 4}, {8, 3}, {2, 4, 3});
}

TEST(LocalPart, WholeRowsAreOneRangeAndPartsOfRowsOneBox) {
  const ParameterLayout columns{MeshKind::kDense, {}, {shard("tp", 2, 1)}};
  const auto boxes = pieces(columns, {3, 8}, {1, {3, 8}}, {1}, {0, 12});
  ASSERT_EQ(boxes.size(), 1U);
  EXPECT_EQ(boxes[0].box, (TensorBox{{0, 4}, {3, 4}}));
  const ParameterLayout experts{MeshKind::kSparse, {}, {shard("ep", 2, 0)}};
  const auto ranges = pieces(experts, {4, 6, 5}, {1, {4, 6, 5}}, {1}, {0, 60});
  ASSERT_EQ(ranges.size(), 1U);
  EXPECT_EQ(ranges[0].in_box, (Range{60, 120}));
}

TEST(LocalPart, RefusesGradientsThatWouldBeSummedTwiceOrNever) {
  const auto refuses = [](AxisPlacement axis, const Shape& shape) {
    EXPECT_THROW(validate({MeshKind::kDense, {}, {std::move(axis)}}, shape, "w"), Error);
  };
  using enum PlacementKind;
  refuses({"tp", 2, {kReplicate}, {kReplicate}}, {4});
  refuses({"tp", 2, {kReplicate}, {kInvariant}}, {4});
  refuses({"tp", 2, {kInvariant}, {kPartial}}, {4});
  refuses({"tp", 2, {kShard, 0}, {kPartial}}, {4});
  refuses({"tp", 2, {kShard, 0}, {kShard, 1}}, {4, 4});
  refuses({"tp", 2, {kPartial}, {kReplicate}}, {4});
  refuses(shard("tp", 3, 0), {4});
  refuses(shard("tp", 2, 1), {4});
  refuses(partial("tp", 1), {4});
  EXPECT_THROW(validate({MeshKind::kDense, {}, {partial("tp", 2), partial("tp", 2)}}, {4}, "w"),
               Error);
  EXPECT_THROW(validate({MeshKind::kDense, {3, 2}, {}}, {4}, "w"), Error);
}

// plan_moves: every wanted element comes once, from a rank that has it, and nothing else moves.

std::vector<Range> cut(std::int64_t numel, int ranks, std::mt19937_64& random) {
  std::vector<std::int64_t> ends;
  for (int rank = 0; rank + 1 < ranks; ++rank) {
    ends.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(numel + 1)));
  }
  ends.push_back(numel);
  std::sort(ends.begin(), ends.end());
  std::vector<Range> ranges;
  std::int64_t begin = 0;
  for (const auto end : ends) {
    ranges.push_back(begin == end ? Range{} : Range{begin, end});
    begin = end;
  }
  return ranges;
}

TEST(Redistribute, TheSameLayoutMovesNothingBetweenRanks) {
  const std::vector<Range> same = {{0, 5}, {}, {5, 9}};
  const std::vector<Move> expected = {{{0, 5}, 0, 0}, {{5, 9}, 2, 2}};
  EXPECT_EQ(plan_moves(same, same), expected);
}

TEST(Redistribute, ARankTakesItsOwnElementsFirstAndTheRestFromTheLowestRank) {
  const std::vector<Range> everywhere(3, {0, 10});
  for (const auto& move : plan_moves(everywhere, {{0, 4}, {4, 8}, {8, 10}})) {
    EXPECT_EQ(move.from, move.to);
  }
  const std::vector<Move> expected = {{{0, 4}, 0, 0},  {{4, 10}, 1, 0}, {{0, 4}, 0, 1},
                                      {{4, 10}, 1, 1}, {{0, 4}, 0, 2},  {{4, 10}, 1, 2}};
  EXPECT_EQ(plan_moves({{0, 4}, {4, 10}, {}}, everywhere), expected);
}

TEST(Redistribute, ElementsThatNoOneHoldsAreAnError) {
  EXPECT_THROW(plan_moves({{0, 4}}, {{0, 5}}), Error);
}

TEST(Redistribute, RandomLayoutsAreFilledExactlyOnceFromRanksThatHoldThem) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 8);
    const auto numel = static_cast<std::int64_t>(random() % 40);
    const auto before = cut(numel, ranks, random);
    const auto after = random() % 4 == 0 ? std::vector<Range>(before.size(), {0, numel})
                                         : cut(numel, ranks, random);
    std::vector<std::vector<int>> filled(after.size(),
                                         std::vector<int>(static_cast<std::size_t>(numel), 0));
    for (const auto& move : plan_moves(before, after)) {
      EXPECT_FALSE(move.range.empty());
      EXPECT_EQ(intersect(move.range, before[static_cast<std::size_t>(move.from)]), move.range);
      for (auto i = move.range.begin; i < move.range.end; ++i) {
        ++filled[static_cast<std::size_t>(move.to)][static_cast<std::size_t>(i)];
        if (before[static_cast<std::size_t>(move.to)].begin <= i &&
            i < before[static_cast<std::size_t>(move.to)].end) {
          EXPECT_EQ(move.from, move.to);
        }
      }
    }
    for (std::size_t rank = 0; rank < after.size(); ++rank) {
      for (std::int64_t i = 0; i < numel; ++i) {
        EXPECT_EQ(filled[rank][static_cast<std::size_t>(i)],
                  after[rank].begin <= i && i < after[rank].end ? 1 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::layout::local_part_test
