// Both readings of the ranks, the parts of tp, and the sums that follow from a declaration.

#include "layout/local_part.h"
#include "support/test.h"
#include "tessera/data_axes.h"

namespace tessera::mesh_shapes_test {
namespace {

/// dp_shard 4 x tp 2 = dp_shard_mod_ep 2 x ep 4.
MeshShapes eight() { return {MeshShape::dense(1, 1, 4, 1, 2), MeshShape::sparse(1, 1, 2, 4, 1)}; }

TEST(MeshShapes, AreTwoReadingsOfTheSameNumbers) {
  const auto mesh = eight();
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(mesh.coordinate(rank, axis::kShard), rank / 2);
    EXPECT_EQ(mesh.coordinate(rank, axis::kTensor), rank % 2);
    EXPECT_EQ(mesh.coordinate(rank, axis::kExpertData), rank / 4);
    EXPECT_EQ(mesh.coordinate(rank, axis::kExpert), rank % 4);
  }
  EXPECT_THAT(mesh.ranks_of(5, {axis::kExpert}), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(mesh.ranks_of(5, {axis::kExpertData}), ElementsAre(1, 5));
  EXPECT_THAT(mesh.ranks_of(5, {axis::kTensor}), ElementsAre(4, 5));
  EXPECT_THAT(mesh.ranks_of(5, {axis::kShard}), ElementsAre(1, 3, 5, 7));
  EXPECT_TRUE(mesh.has_model_axes());
}

TEST(MeshShapes, WithoutAnotherReadingExpertsLieAsTp) {
  const MeshShapes mesh(MeshShape::dense(1, 2, 3, 1, 2));
  EXPECT_EQ(mesh.sparse(), MeshShape::sparse(1, 2, 3, 1, 2));
  EXPECT_EQ(to_string(mesh), to_string(mesh.dense()));
  EXPECT_FALSE(MeshShapes(MeshShape::dense(1, 2, 3, 1, 1)).has_model_axes());
}

TEST(MeshShapes, SizesThatDisagreeAreRefusedWithTheRule) {
  const auto make = [](const MeshShape& sparse) {
    return refusal_of([&] { MeshShapes(MeshShape::dense(1, 2, 4, 1, 2), sparse); });
  };
  EXPECT_EQ(make(MeshShape::sparse(1, 2, 2, 4, 1)), "");
  EXPECT_THAT(make(MeshShape::sparse(1, 2, 2, 2, 1)),
              Says("dp_shard_mod_ep x ep x etp = dp_shard x cp x tp"));
  EXPECT_THAT(make(MeshShape::sparse(1, 1, 4, 4, 1)), Says("dp_replicate"));
}

TEST(MeshShapes, AxesOfTwoReadingsFormNoGroup) {
  EXPECT_THAT(refusal_of([] { (void)eight().ranks_of(0, {axis::kTensor, axis::kExpert}); }),
              Says("tp, ep", "two readings"));
  EXPECT_THAT(refusal_of([] { (void)eight().ranks_of(0, {"nowhere"}); }), Says("nowhere"));
}

// Rank t of tp = key index t / R, copy t % R.
TEST(MeshShapes, TpSplitsIntoKeyHeadsAndCopies) {
  const MeshShapes mesh(MeshShape::dense(1, 1, 2, 1, 8));
  for (int rank = 0; rank < 16; ++rank) {
    const int t = rank % 8;
    EXPECT_EQ(mesh.coordinate(rank, "tp_kv/2"), t / 4);
    EXPECT_EQ(mesh.coordinate(rank, "tp_rep/4"), t % 4);
    const int first = rank - t;
    const auto copies = mesh.ranks_of(rank, {"tp_rep/4"});
    ASSERT_EQ(copies.size(), 4U);
    EXPECT_EQ(copies.front(), first + t / 4 * 4);
    const auto same_copy = mesh.ranks_of(rank, {"tp_kv/2"});
    EXPECT_THAT(same_copy, ElementsAre(first + t % 4, first + t % 4 + 4));
    EXPECT_EQ(mesh.ranks_of(rank, {"tp_kv/2", "tp_rep/4"}), mesh.ranks_of(rank, {axis::kTensor}));
  }
  EXPECT_FALSE(mesh.dense().has("tp_kv/3"));
  EXPECT_FALSE(mesh.dense().has("tp_kv/"));
  EXPECT_THAT(refusal_of([&] { (void)mesh.ranks_of(0, {"tp", "tp_kv/2"}); }), Says("overlap"));
}

TEST(MeshShapes, HeadsThatAreFewerThanRanks) {
  const auto axes = [](int tp, int heads) {
    const auto found = tensor_axis_of_heads(tp, heads);
    return concat(found.heads.name, " ", found.heads.size, ", ", found.copies.name, " ",
                  found.copies.size);
  };
  EXPECT_EQ(axes(4, 8), "tp 4, tp_rep/1 1");
  EXPECT_EQ(axes(8, 2), "tp_kv/2 2, tp_rep/4 4");
  EXPECT_EQ(axes(4, 1), "tp_kv/1 1, tp 4");
  EXPECT_EQ(axes(1, 2), "tp 1, tp_rep/1 1");
  EXPECT_THAT(refusal_of([] { (void)tensor_axis_of_heads(4, 6); }), Says("6 heads", "4 ranks"));
}

AxisPlacement on(const std::string& axis, int size, PlacementKind parameter,
                 PlacementKind gradient) {
  return {axis, size, {parameter}, {gradient}};
}
AxisPlacement partial(const std::string& axis, int size) {
  return AxisPlacement::partial(axis, size);
}

// Naive: the router's gradient over dp alone; experts divided by their own number of ranks.
TEST(Reductions, FollowFromTheDeclaration) {
  using enum PlacementKind;
  const DataAxes data({MeshShape::dense(1, 2, 4, 1, 2), MeshShape::sparse(1, 2, 2, 4, 1)});
  EXPECT_EQ(data.dense.divide_factor, 8);
  const auto sums = [&](MeshKind mesh, const std::vector<AxisPlacement>& axes) {
    return to_string(reductions_of({mesh, {}, axes}, data, "w"));
  };
  EXPECT_EQ(sums(MeshKind::kDense, {partial("tp", 2)}),
            "sum over dp_shard x tp, then dp_replicate, / 8");
  EXPECT_EQ(sums(MeshKind::kDense, {on("tp", 2, kShard, kShard)}),
            "sum over dp_shard, then dp_replicate, / 8");
  EXPECT_EQ(sums(MeshKind::kDense, {on("tp", 2, kInvariant, kInvariant)}),
            "sum over dp_shard, then dp_replicate, / 8");
  EXPECT_EQ(sums(MeshKind::kSparse, {on("ep", 4, kShard, kShard)}),
            "sum over dp_shard_mod_ep, then dp_replicate, / 8");
  EXPECT_EQ(sums(MeshKind::kSparse, {partial("ep", 4)}),
            "sum over dp_shard_mod_ep x ep, then dp_replicate, / 8");
}

TEST(Reductions, NeedADeclarationOnEveryModelAxis) {
  const DataAxes data({MeshShape::dense(1, 1, 4, 1, 2), MeshShape::sparse(1, 1, 2, 2, 2)});
  const auto refusal = [&](const ParameterLayout& layout) {
    return refusal_of([&] { (void)reductions_of(layout, data, "w"); });
  };
  EXPECT_THAT(refusal({}),
              Says("w: found no placement on the axis tp of 2 ranks", "DeclaresLayouts"));
  EXPECT_THAT(refusal({MeshKind::kSparse, {}, {partial("ep", 2)}}),
              Says("no placement on the axis etp of 2 ranks"));
  EXPECT_THAT(refusal({MeshKind::kDense, {}, {partial("ep", 2)}}), Says("expected one on tp"));
  EXPECT_THAT(refusal({MeshKind::kDense, {}, {partial("tp", 4)}}), Says("tp 4"));
  const DataAxes wide({MeshShape::dense(1, 1, 1, 1, 4), MeshShape::sparse(1, 1, 1, 1, 4)});
  const std::vector<AxisPlacement> twice = {partial("tp_kv/2", 2), partial("tp_kv/2", 2)};
  EXPECT_THAT(refusal_of([&] { (void)reductions_of({MeshKind::kDense, {}, twice}, wide, "w"); }),
              Says("w: ", "overlap"));
  EXPECT_THAT(refusal({MeshKind::kDense, {}, {partial("dp_shard", 4)}}), Says("dp_shard"));
  // Experts that are whole on every rank need data sums alone.
  const DataAxes whole({MeshShape::dense(1, 1, 4, 1, 2), MeshShape::sparse(1, 1, 8, 1, 1)});
  EXPECT_EQ(to_string(reductions_of({MeshKind::kSparse, {}, {}}, whole, "w")),
            "sum over dp_shard_mod_ep, / 4");
}

TEST(GlobalShape, IsTheOneWhoseLocalShapeItCameFrom) {
  const auto rows = AxisPlacement::shard(axis::kExpert, 4, 0);
  const auto inner = AxisPlacement::shard(axis::kExpertTensor, 2, 2);
  const ParameterLayout plain{MeshKind::kSparse, {}, {rows}};
  EXPECT_THAT(layout::global_shape(plain, {2, 5}, "w"), ElementsAre(8, 5));
  const ParameterLayout split{MeshKind::kSparse, {8, 2, 6, 5}, {rows, inner}};
  const std::vector<std::int64_t> whole = {8, 12, 5};
  EXPECT_EQ(layout::global_shape(split, layout::local_shape(split, whole), "w"), whole);
  EXPECT_THAT(refusal_of([&] { (void)layout::global_shape(split, {2, 7, 5}, "w"); }),
              Says("w: found a tensor of 7"));
}

// Naive: a rank's one expert, or its one row of the gates, is no part of any dim.
TEST(GlobalShape, KnowsDimsOfWhichARankHasOneElement) {
  for (const std::vector<std::int64_t>& cut :
       {std::vector<std::int64_t>{4, 2, 6, 5}, {8, 2, 2, 5}, {4, 2, 2, 5}, {4, 2, 2, 1}}) {
    const ParameterLayout split{MeshKind::kSparse,
                                cut,
                                {AxisPlacement::shard(axis::kExpert, 4, 0),
                                 AxisPlacement::shard(axis::kExpertTensor, 2, 2)}};
    const std::vector<std::int64_t> whole = {cut[0], cut[1] * cut[2], cut[3]};
    EXPECT_EQ(layout::global_shape(split, layout::local_shape(split, whole), "w"), whole);
  }
}

}  // namespace
}  // namespace tessera::mesh_shapes_test
