// Groups: on what the ranks of one sharded tree communicate.
//
// Ordinary members of a World's groups (tessera/world.h), by what they are for. Next: bucket.h,
// which names those of one bucket.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "fsdp/bucket.h"
#include "layout/bucket_plan.h"
#include "tessera/mesh.h"

namespace tessera::fsdp {

class Groups {
 public:
  /// Collective among the ranks of the mesh.
  explicit Groups(Mesh mesh);

  const Mesh& mesh() const { return mesh_; }
  World& world() const { return *mesh_.world(); }
  /// What buckets of these axes communicate on. The first time: collective among those ranks.
  AxesGroups of(const layout::BucketKey& key);
  /// Null where there is one rank, all of these:
  comm::Group* data() const { return data_.get(); }  ///< all ranks of the pipeline stage, control
  /// The ranks of one replica: control, and gathers in the queue.
  comm::Group* replica_control() const { return replica_control_.get(); }
  comm::Group* replica_gathers() const { return replica_gathers_.get(); }
  comm::Group* replicas() const { return replicas_.get(); }  ///< of one shard

 private:
  const Mesh mesh_;
  std::vector<std::pair<std::vector<std::string>, AxesGroups>> of_axes_;  // by shard axes
  std::shared_ptr<comm::Group> data_, replica_control_, replica_gathers_, replicas_;
};

}  // namespace tessera::fsdp
