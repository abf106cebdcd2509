#include "fsdp/groups.h"

#include "tessera/world.h"

namespace tessera::fsdp {

Groups::Groups(Mesh mesh) : mesh_(std::move(mesh)) {
  const auto& shapes = mesh_.shapes();
  const int rank = world().rank();
  const auto of_several = [&](const std::vector<int>& members, const char* purpose) {
    return members.size() > 1 ? world().group(members, purpose) : std::shared_ptr<comm::Group>();
  };
  replicas_ = of_several(shapes.dense().group_of(rank, {axis::kReplicate}), "replicas");
  const auto replica = shapes.replica_of(rank);
  replica_gathers_ = of_several(replica, "gather");
  replica_control_ = of_several(replica, "shard control");
  data_ = of_several(shapes.stage_of(rank), "data");
}

AxesGroups Groups::of(const layout::BucketKey& key) {
  const auto& axes = key.reductions.shard_axes;
  for (const auto& [known, groups] : of_axes_) {
    if (known == axes) return groups;
  }
  AxesGroups made;
  made.groups.replicas = replicas();
  const auto members = mesh_.ranks_of({axes.begin(), axes.end()});
  if (members.size() > 1) {
    // Separate channels, so that a long reduction does not hold up the next gather. The World keeps
    // them.
    made.groups.gather = world().group(members, "gather").get();
    made.groups.reduce = world().group(members, "reduce").get();
    made.control = world().group(members, "shard control").get();
    made.rank = made.groups.gather->rank();
    made.ranks = made.groups.gather->size();
  }
  of_axes_.emplace_back(axes, made);
  return made;
}

}  // namespace tessera::fsdp
