// Whether the tensors that users hold still show the memory that is gathered and stepped.
//
// Module::to(dtype), set_data or torch::load after fully_shard give a tensor memory of its own: a
// shard is then stepped and never gathered, an unsharded parameter computes with old values for
// ever. No hook tells, so it is looked at where a unit's parameters become readable.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera::fsdp {

class Unit;

/// Compares pointers and dtypes only, and looks whether the hook that takes the gradients is still
/// there; allocates nothing. Errors: kUsage naming the parameter, what was found and expected.
void check_integrity(const Unit& unit);

/// Of parameters that were just gathered, for require_unwritten().
void note_versions(const Unit& unit);
/// Nobody wrote to the module's tensors since note_versions(): the memory goes, and such a write
/// with it, but for one rank whose unsharded parameters are the shard. Errors: kUsage naming unit
/// and parameter.
void require_unwritten(const Unit& unit);

/// A gradient that the user has put on a shard lies where the shard does: assignment takes any.
/// Errors: kUsage naming the parameter and both devices.
void require_gradient_here(const at::Tensor& gradient, const at::Tensor& shard,
                           std::string_view parameter);

/// requires_grad_() on a shard would change nothing: whether a parameter is trained stands in its
/// contract, which lays out the buckets of all ranks. Once a forward. Errors: kUsage naming the
/// parameter.
void check_trainable(const Unit& unit);

}  // namespace tessera::fsdp
