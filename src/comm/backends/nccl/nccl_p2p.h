// Messages between two ranks over NCCL (p2p.h).
//
// NCCL has no tags: of a communicator the first receive gets what was sent first. So there is one
// communicator for each direction (activations, gradients) and way between two ranks, and within
// one of them receives have to be posted in the order in which the other rank sends, as in every
// kind of schedule and in the order that lower() gives (docs/pipeline.md). A list that does not keep
// it would exchange tensors of equal size without a word: a pipeline on CUDA refuses it
// (ValidProgram::require_messages_in_order). Ends of other sizes wait until the timeout.
//
// c10d makes the communicator of two ranks inside the first message between them, which waits there
// for the other end: two ranks that post first what the other one posts later would wait for ever. So
// P2P::connect makes them, in one order on all ranks. Run over a stand-in for NCCL (tests/sim/nccl),
// not on cards: one has one rank. Private to nccl.cpp.
#pragma once

#include <memory>

#include "comm/backends/nccl/nccl_backends.h"
#include "comm/p2p.h"

namespace tessera::comm {

std::unique_ptr<P2P> open_nccl_p2p(const NcclPlace& place, std::shared_ptr<HostWaits> waits);

}  // namespace tessera::comm
