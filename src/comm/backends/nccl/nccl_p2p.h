// Messages between two ranks over NCCL (p2p.h).
//
// NCCL has no tags: in a communicator the first receive gets what was sent first. So there is one
// communicator for each direction (activations, gradients) and route between two ranks, and within
// one of them receives must be posted in the order in which the other rank sends. Every kind of
// schedule and lower() keep that order (docs/pipeline.md). A list that does not would silently
// exchange tensors of equal size: a pipeline on CUDA refuses it
// (ValidProgram::require_messages_in_order). Ends with other sizes wait until the timeout.
//
// c10d makes the communicator of two ranks inside the first message between them, which waits there
// for the other end: two ranks that each post first what the other posts later would wait for ever.
// So P2P::connect makes them, in one order on all ranks. Tested over a stand-in for NCCL
// (tests/sim/nccl), not on several cards. Private to nccl.cpp.
#pragma once

#include <memory>

#include "comm/backends/nccl/nccl_backends.h"
#include "comm/p2p.h"

namespace tessera::comm {

std::unique_ptr<P2P> open_nccl_p2p(const NcclPlace& place, std::shared_ptr<HostWaits> waits);

}  // namespace tessera::comm
