// weight_gradient() decides when the gradient of a layer's weight is formed and how it reaches its
// slot.
//
// It is formed in the backward, or deferred where the model defers weight gradients
// (ShardedBase::set_defer_weight_gradients, Backward::kInputOnly, sink.h), or deferred until an
// exchange of the same backward is under way, whose time it fills. In each case it reaches the
// parameter's slot through the sink. A weight that is no leaf of a sharded model (a cast weight, a
// plain module) gets its gradient at once. Where the gradient is the first in its slot and has the
// slot's dtype, the product is written there. Next: ../nn/linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "grad/sink.h"

namespace tessera::grad {

enum class WeightGradient : std::uint8_t {
  /// Deferred where a backward defers weight gradients.
  kMayWait,
  /// Formed at once: the tensors that are held for it until then (for a projection to the
  /// vocabulary, the gradient of all logits) are larger than what a shorter wait is worth.
  kAtOnce,
  /// As kMayWait. In a backward that forms it, it is formed while an exchange is under way whose
  /// node calls form_under_exchange(); the tensors that the product reads live until then. It is
  /// still the only addend of its parameter in this micro-batch, so that no bit changes.
  kUnderExchange,
};

/// Returns, in a backward, the raw gradient of `parameter`. Returns undefined where the gradient
/// comes or has come in another way: deferred, written into its slot ([Note: direct slots]), or, on
/// a device, added there from memory that is free again. The backward returns the result, and
/// nothing arrives twice.
at::Tensor weight_gradient(const at::Tensor& parameter, Product product,
                           WeightGradient when = WeightGradient::kMayWait);

/// Forms, between issue and wait of an exchange in a backward, the weight gradients that layers of
/// the parameter's model have deferred until then, oldest first. Those without an exchange are
/// formed at the next unit's marker or at the end of the backward, before their unit is reduced.
void form_under_exchange(const at::Tensor& parameter);

}  // namespace tessera::grad
