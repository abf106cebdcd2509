// Messages between two ranks over NCCL (mail.h).
//
// NCCL has no tags: of a communicator the first receive gets what was sent first. So there is one
// communicator for each direction (activations, gradients) and way between two ranks, and within
// one of them receives have to be posted in the order in which the other rank sends, as in every
// kind of schedule and in the order that lower() gives (docs/pipeline.md). A list that does not keep
// it would exchange tensors of equal size without a word: a pipeline on CUDA refuses it
// (ValidProgram::require_messages_in_order). Ends of other sizes wait until the timeout. Not run
// yet: one card has one rank. Private to nccl.cpp.
#pragma once

#include <memory>

#include "comm/backends/gloo/point_to_point.h"
#include "comm/mail.h"

namespace tessera::comm {

/// Communicators are made at the first message between two ranks. `store` is of this group.
std::unique_ptr<Mail> open_nccl_mail(const ChannelOptions& channel,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     c10::Device device, std::shared_ptr<HostWaits> waits);

}  // namespace tessera::comm
