// The gradient of a layer's parameter: formed in the backward, or put off where the model defers
// weight gradients (ShardedBase::set_defer_weight_gradients).
//
// Either way it reaches the parameter's slot through the sink. What is no leaf of a sharded model
// (a cast weight, a plain module) has its gradient at once. Next: ../grad/sink.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "grad/leaf.h"
#include "grad/sink.h"

namespace tessera::nn {

/// product() -> the raw gradient of `parameter`; undefined where it comes later: the backward
/// returns that, and nothing arrives twice. `product` holds what it needs by value.
template <class Product>
at::Tensor weight_gradient(const at::Tensor& parameter, Product product) {
  const auto leaf = grad::find_leaf(parameter);
  if (!leaf || leaf->sink == nullptr || leaf->sink->store() == nullptr) return product();
  leaf->sink->store()->put(leaf->slot, std::move(product));
  return {};
}

}  // namespace tessera::nn
