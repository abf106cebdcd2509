// When the gradient of a layer's weight is formed, and how it reaches its slot.
//
// It is formed in the backward, or put off where the model defers weight gradients
// (ShardedBase::set_defer_weight_gradients, Backward::kInputOnly, sink.h), or put off until an
// exchange of the same backward is under way, whose time it fills. Either way it reaches the parameter's
// slot through the sink. What is no leaf of a sharded model (a cast weight, a plain module) has its
// gradient at once. Where it is the slot's first and has its dtype, the product is written there.
// Next: ../nn/linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "grad/sink.h"

namespace tessera::grad {

enum class WeightGradient : std::uint8_t {
  /// Where a backward puts weight gradients off, later.
  kMayWait,
  /// At once: what is held for it until then (of a projection to the vocabulary, the gradient of
  /// all logits) is larger than what anybody waits less for.
  kAtOnce,
  /// As kMayWait; in a backward that forms it, while an exchange is under way whose node calls
  /// form_under_exchange(). What the product reads lives until then. It stays the one addend of its
  /// parameter in this micro-batch, so no bit changes.
  kUnderExchange,
};

/// In a backward: the raw gradient of `parameter`, or undefined where it comes, or has come,
/// another way: put off, written into its slot ([Note: direct slots]), or, on a device, added there
/// from memory that is free again. The backward returns that, and nothing arrives twice.
at::Tensor weight_gradient(const at::Tensor& parameter, Product product,
                           WeightGradient when = WeightGradient::kMayWait);

/// In a backward, between issue and wait of an exchange: forms what layers of the parameter's model
/// have put off until then, oldest first. What no exchange comes to is formed at the next unit's
/// marker, or at the end of the backward: before its unit is reduced.
void form_under_exchange(const at::Tensor& parameter);

}  // namespace tessera::grad
