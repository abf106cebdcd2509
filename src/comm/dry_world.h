// A World of one thread that stands for one rank of many: the others do as it does.
//
// Whatever is called collectively runs on this thread alone, for any number of ranks, and costs
// nothing but the calls. Tensors are fake where a FakeScope is around (dry/fake_operations.h).
// Next: backends/dry/dry.h.
#pragma once

#include <functional>
#include <memory>

#include "comm/backends/dry/dry.h"
#include "tessera/kernels_of.h"
#include "tessera/world.h"

namespace tessera::comm {

/// Rank `rank` of `ranks`, on the CPU or on a device that is not there (dry/fake_device.h), whose
/// collectives take what NCCL's would. `notes` is told of each collective and each message. Errors:
/// kUsage for a rank that is none of them.
std::shared_ptr<World> dry_world(int rank, int ranks, DryNotes notes = {},
                                 KernelsOf kernels = KernelsOf::kCpu);

}  // namespace tessera::comm
