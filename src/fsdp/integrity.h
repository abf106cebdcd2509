// Whether the tensors that users hold still show the memory that is gathered and stepped.
//
// Module::to(dtype), set_data or torch::load after fully_shard give a tensor memory of its own: a
// shard is then stepped and never gathered, an unsharded parameter computes with old values for
// ever. No hook tells, so it is looked at where a unit's parameters become readable.
#pragma once

namespace tessera::fsdp {

class Unit;

/// Compares pointers and dtypes only; allocates nothing. Errors: kUsage naming the parameter, what
/// was found and what was expected.
void check_integrity(const Unit& unit);

/// requires_grad_() on a shard would change nothing: whether a parameter is trained stands in its
/// contract, which lays out the buckets of all ranks. Once a forward. Errors: kUsage naming the
/// parameter.
void check_trainable(const Unit& unit);

}  // namespace tessera::fsdp
