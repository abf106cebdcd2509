// Tensors of a device over Gloo, through pinned memory of the host.
//
// Issuing copies what goes out to the host and waits there for the copy: the device alone is waited
// for, and no rank. What has come goes back to the device when it is waited for. So a collective
// holds up the host where NCCL would hold up a stream: for machines without NCCL, and for proofs. The
// bits are those of tensors of the CPU. Private to gloo.cpp.
#pragma once

#include <memory>

#include "comm/backends/backend.h"
#include "comm/backends/gloo/point_to_point.h"
#include "comm/group.h"

namespace tessera::comm {

/// The same group for tensors of the place's device.
std::shared_ptr<Group> stage(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place);

}  // namespace tessera::comm
