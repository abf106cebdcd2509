#include "comm/backends/nccl/nccl.h"
#include "tessera/error.h"

namespace tessera::comm {

bool nccl_built_in() { return false; }

at::DeviceType nccl_device() { return at::kCUDA; }

DeviceFacts nccl_facts(int /*device*/) { return {}; }

std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& /*launch*/) {
  throw Error(
      ErrorKind::kUsage,
      "comm.backend: found nccl, but this program is built without NCCL; use gloo, or build "
      "against a libtorch with CUDA");
}

}  // namespace tessera::comm
