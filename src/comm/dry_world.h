// A World of one thread that stands for one rank of many: the others do what it does.
//
// All collective calls run on this thread only, for any number of ranks, and cost nothing but the
// calls. Tensors are fake within a FakeScope (dry/fake_operations.h). Next: backends/dry/dry.h.
#pragma once

#include <functional>
#include <memory>

#include "comm/backends/dry/dry.h"
#include "tessera/kernels_of.h"
#include "tessera/world.h"

namespace tessera::comm {

/// Returns the World of rank `rank` of `ranks`, on the CPU or on a device that does not exist
/// (dry/fake_device.h), whose collectives take what NCCL's would. `notes` is told of each
/// collective and each message. Errors: kUsage for a rank outside of [0, ranks).
std::shared_ptr<World> dry_world(int rank, int ranks, DryNotes notes = {},
                                 KernelsOf kernels = KernelsOf::kCpu);

}  // namespace tessera::comm
