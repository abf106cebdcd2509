#include "tessera/mesh.h"

#include "support/test.h"

namespace tessera::mesh_test {
namespace {

using Names = std::vector<std::string_view>;

TEST(MeshShape, DensePrintsAllAxesInOrder) {
  EXPECT_EQ(to_string(MeshShape::dense(1, 2, 3, 1, 4)),
            "pp 1 x dp_replicate 2 x dp_shard 3 x cp 1 x tp 4");
  EXPECT_EQ(to_string(MeshShape::sparse(1, 2, 3, 4, 5)),
            "pp 1 x dp_replicate 2 x dp_shard_mod_ep 3 x ep 4 x etp 5");
}

TEST(MeshShape, LastAxisVariesFastest) {
  const auto shape = MeshShape::dense(1, 2, 3, 1, 4);
  EXPECT_EQ(shape.size(), 24);
  EXPECT_EQ(shape.coordinate(0, axis::kTensor), 0);
  EXPECT_EQ(shape.coordinate(7, axis::kTensor), 3);
  EXPECT_EQ(shape.coordinate(7, axis::kShard), 1);
  EXPECT_EQ(shape.coordinate(12, axis::kReplicate), 1);
  EXPECT_EQ(shape.coordinate(12, axis::kShard), 0);
}

TEST(MeshShape, UnknownAxisHasSizeOneAndCoordinateZero) {
  const MeshShape shape({{"a", 2}});
  EXPECT_FALSE(shape.has("b"));
  EXPECT_EQ(shape.size_of("b"), 1);
  EXPECT_EQ(shape.coordinate(1, "b"), 0);
  EXPECT_EQ(shape.group_of(1, {"b"}), std::vector<int>{1});
}

TEST(MeshShape, GroupsOfOneAxis) {
  const auto shape = MeshShape::dense(1, 2, 3, 1, 2);
  EXPECT_EQ(shape.group_of(3, {axis::kTensor}), (std::vector<int>{2, 3}));
  EXPECT_EQ(shape.group_of(3, {axis::kShard}), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(shape.group_of(3, {axis::kReplicate}), (std::vector<int>{3, 9}));
}

TEST(MeshShape, FlattenedGroupsFollowMeshOrderInAnyOrderOfNames) {
  const auto shape = MeshShape::dense(1, 2, 2, 1, 2);
  EXPECT_EQ(shape.group_of(5, {axis::kShard, axis::kTensor}), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(shape.group_of(5, {axis::kTensor, axis::kReplicate}), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(shape.group_of(5, {}), std::vector<int>{5});
}

TEST(MeshShape, GroupsPartitionTheRanksForEveryChoiceOfAxes) {
  const auto shape = MeshShape::dense(2, 3, 2, 1, 2);
  const Names all = {axis::kPipeline, axis::kReplicate, axis::kShard, axis::kContext,
                     axis::kTensor};
  for (unsigned chosen = 0; chosen < 32; ++chosen) {
    Names names;
    for (unsigned i = 0; i < 5; ++i) {
      if ((chosen >> i & 1U) != 0) names.push_back(all[i]);
    }
    std::multiset<int> seen;
    for (int rank = 0; rank < shape.size(); ++rank) {
      const auto group = shape.group_of(rank, names);
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      EXPECT_EQ(std::count(group.begin(), group.end(), rank), 1);
      for (const int member : group) EXPECT_EQ(shape.group_of(member, names), group);
      if (group.front() == rank) seen.insert(group.begin(), group.end());
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(shape.size()));
    EXPECT_EQ(std::set<int>(seen.begin(), seen.end()).size(), seen.size());
  }
}

TEST(MeshShape, WrongShapesAreConfigErrors) {
  const auto kind_of = [](const auto& make) {
    try {
      make();
    } catch (const Error& error) {
      return error.kind();
    }
    return ErrorKind::kInternal;
  };
  EXPECT_EQ(kind_of([] { return MeshShape({{"a", 0}}); }), ErrorKind::kConfig);
  EXPECT_EQ(kind_of([] { return MeshShape({{"a", 2}, {"a", 2}}); }), ErrorKind::kConfig);
  EXPECT_EQ(kind_of([] { return MeshShape::dense(1, 1, 1, 0, 1); }), ErrorKind::kConfig);
  EXPECT_EQ(kind_of([] { return MeshShape({{"a", 2}}).group_of(2, {"a"}); }), ErrorKind::kConfig);
}

}  // namespace
}  // namespace tessera::mesh_test
