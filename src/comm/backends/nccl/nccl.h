// The NCCL backend: linked (nccl.cpp) or stubbed (no_nccl.cpp). Callers hold no #ifdef.
//
// It makes the same calls as the other backends, on the group's stream and nowhere else. Where sums
// are formed in the dtype that travels, NCCL adds, in an order of its own: bits may differ from
// Gloo's, and between layouts. Where the sum's dtype is wider (reduce narrower than accumulate),
// addends travel in theirs and are added here, in rank order: the bits are Gloo's. Tested on a card
// with one rank (tests/gpu), and with several ranks over a stand-in for NCCL (tests/sim/nccl).
#pragma once

#include <memory>

#include "comm/backends/backend.h"

namespace tessera::comm {

/// Whether the backend is linked and not stubbed.
bool nccl_built_in();
/// The type of the devices whose tensors it carries.
at::DeviceType nccl_device();

/// Describes a CUDA device; none in a build without NCCL.
DeviceFacts nccl_facts(int device);

/// Opens the backend. compare_entries goes over Gloo. Errors: kUsage when it is not built in or
/// there is no CUDA device; its groups throw it also where another rank computes on the same
/// device.
std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& launch);

}  // namespace tessera::comm
