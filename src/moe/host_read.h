// The one place where experts wait for their device: what the host must know, in one copy.
//
// On a device every read of a value is a wait for all that was started before, so a call of
// experts() makes one: indices, whether scores are finite, and what other ranks send. A profile has
// it as "tessera::host_read". Next: experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::moe {

/// i64 tensors of any shapes, all on one device -> the same on the host.
std::vector<at::Tensor> read_on_host(const std::vector<at::Tensor>& tensors);

/// What was worked out on the host, on a device again: does not wait for it.
at::Tensor to_device(const at::Tensor& on_host, at::Device device);

}  // namespace tessera::moe
