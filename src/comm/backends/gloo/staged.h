// Carries tensors of a device over Gloo, through pinned memory of the host.
//
// Issuing copies what is sent to the host and waits there for the copy: for the device only, and
// for no rank. wait() copies what was received to the device. So a collective blocks the host where
// NCCL would block a stream: it is for machines without NCCL, and for tests. The bits are those of
// tensors on the CPU. Private to gloo.cpp.
#pragma once

#include <memory>

#include "comm/backends/backend.h"
#include "comm/backends/gloo/point_to_point.h"
#include "comm/group.h"

namespace tessera::comm {

/// Returns the same group for tensors of the place's device.
std::shared_ptr<Group> stage(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place);

}  // namespace tessera::comm
