// The NCCL backend: linked (nccl.cpp) or stubbed (no_nccl.cpp). Callers hold no #ifdef.
//
// Same calls as the other backends with one difference that NCCL imposes: it chooses the order of
// additions and adds in the wire dtype, so bits may differ from Gloo's and from run to run on other
// layouts.
#pragma once

#include <memory>

#include "comm/backends/backend.h"

namespace tessera::comm {

/// Built in, and there is a CUDA device.
bool nccl_usable();

/// The backend. compare_entries is not used. Errors: kUsage when it
/// is not built in or there is no CUDA device.
std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& launch);

}  // namespace tessera::comm
