// The NCCL backend: linked (nccl.cpp) or stubbed (no_nccl.cpp). Callers hold no #ifdef.
//
// Same calls as the other backends, launched on the group's stream and nowhere else. Where sums are
// formed in the dtype that travels, NCCL adds, in an order of its own: bits may differ from Gloo's,
// and between layouts. Where they are wider (reduce narrower than accumulate) addends travel as they
// are and are added here, in rank order: Gloo's bits. Run on a card with one rank (tests/gpu), with
// several over a stand-in for NCCL (tests/sim/nccl).
#pragma once

#include <memory>

#include "comm/backends/backend.h"

namespace tessera::comm {

/// Linked, not stubbed.
bool nccl_built_in();
/// Whose tensors it carries.
at::DeviceType nccl_device();

/// Of a CUDA device; without NCCL of none.
DeviceFacts nccl_facts(int device);

/// The backend. compare_entries goes over Gloo. Errors: kUsage when it is not built in or there is no
/// CUDA device; of its groups also where another rank computes on the same device.
std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& launch);

}  // namespace tessera::comm
