#include "comm/nccl.h"
#include "tessera/error.h"

namespace tessera::comm {

bool nccl_usable() { return false; }

void require_nccl() {
  throw Error(
      ErrorKind::kUsage,
      "comm.backend: found nccl, but this program is built without NCCL; use gloo, or build "
      "against a libtorch with CUDA");
}

std::unique_ptr<Group> make_nccl_group(const ChannelOptions& /*channel*/,
                                       const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                       int /*local_rank*/) {
  require_nccl();
  return nullptr;
}

}  // namespace tessera::comm
