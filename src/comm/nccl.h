// The NCCL backend: linked (nccl.cpp) or stubbed (no_nccl.cpp). Callers hold no #ifdef.
//
// Same calls as the other backends with one difference that NCCL imposes: it chooses the order of
// additions and adds in the wire dtype, so bits may differ from Gloo's and from run to run on other
// layouts.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/group.h"
#include "comm/point_to_point.h"

namespace tessera::comm {

/// Built in, and there is a CUDA device.
bool nccl_usable();

/// Errors: kUsage when the backend is not built in or there is no CUDA device.
void require_nccl();

/// `channel.open` and compare_entries are not used. The device is cuda:`local_rank`. Errors: as
/// require_nccl().
std::unique_ptr<Group> make_nccl_group(const ChannelOptions& channel,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       int local_rank);

}  // namespace tessera::comm
