// Checks whether the tensors that users hold still show the memory that is gathered and updated.
//
// Module::to(dtype), set_data or torch::load after fully_shard give a tensor other memory. Then a
// shard is updated but never gathered, and an unsharded parameter keeps old values for ever. No
// hook reports this, so these functions check it where a unit's parameters become readable.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera::fsdp {

class Unit;

/// Compares pointers and dtypes, and checks that the hook that takes the gradients is still there;
/// allocates nothing. Errors: kUsage naming the parameter, what was found and expected.
void check_integrity(const Unit& unit);

/// Notes the versions of parameters that were just gathered, for require_unwritten().
void note_versions(const Unit& unit);
/// Requires that the module's tensors were not written to since note_versions(): such a write is
/// lost when the memory is freed, unless the unsharded parameters are the shard itself
/// (Bucket::aliases_shard). Errors: kUsage naming unit and parameter.
void require_unwritten(const Unit& unit);

/// Requires that a gradient which the user has put on a shard is on the shard's device: assignment
/// accepts any device. Errors: kUsage naming the parameter and both devices.
void require_gradient_here(const at::Tensor& gradient, const at::Tensor& shard,
                           std::string_view parameter);

/// Requires that requires_grad_() was not called on a shard, which would change nothing: the
/// contract says whether a parameter is trained, and all ranks lay out their buckets by it. Called
/// once for each forward. Errors: kUsage naming the parameter.
void check_trainable(const Unit& unit);

}  // namespace tessera::fsdp
