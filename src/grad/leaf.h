// Leaf: one tensor object of the user's module that shows an unsharded parameter, and the hook that
// takes its gradients away. [Note: one leaf a use]
//
// The engine sums all uses of one AccumulateGrad node in the raw dtype before any hook sees them
// (bf16 256, 1, -256 gives 0). So tied parameters are several leaves over one storage, and every
// forward of a unit gives its leaves new AccumulateGrad nodes: before it and, where the code around
// the unit uses them too, after it. Contributions are then added in the slot, unrounded. Only
// several uses of one tensor object inside one forward still arrive as a sum of autograd; the
// contract says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "grad/sink.h"
#include "tessera/contract.h"

namespace tessera::grad {

/// A base class: fsdp derives a leaf that knows its parameter.
struct Leaf {
  virtual ~Leaf() = default;

  at::Tensor tensor;
  std::string name;                  ///< its name in the user's module, relative to the unit
  GradContract* contract = nullptr;  ///< its parameter's; null without one
  GradSink* sink = nullptr;          ///< null until the unit has joined a runtime
  SlotId slot = 0;
  std::uint32_t gathered_version = 0;  ///< the tensor's version after its last gather
  bool uses_counted = false;           ///< whether the first backward has counted its uses
};

/// Installs a leaf on its tensor: raw gradients of any dtype go to the leaf's sink and nowhere
/// else; `.grad` becomes a tensor that throws when an optimizer accesses it. A frozen tensor is
/// only marked with its leaf.
void install(const std::shared_ptr<Leaf>& leaf, bool trainable);
/// Changes whether an installed leaf takes gradients.
void set_trainable(const Leaf& leaf, bool trainable);
/// Gives the leaf a new AccumulateGrad node for the forward that begins.
void renew_accumulator(const Leaf& leaf);
/// Whether a tensor that is not a Leaf has hooks on its gradient: on the tensor, after its
/// accumulation, or on its AccumulateGrad node.
bool has_hooks(const at::Tensor& tensor);
/// Whether, in the backward of a node that uses the leaf, nothing else of that forward uses it, no
/// other hook sees its gradient, and gradients go to leaves alone. Otherwise autograd adds its
/// gradient up or passes it on.
bool arrives_alone(const Leaf& leaf);
/// Returns the leaf that the tensor already is, or null.
std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor);

}  // namespace tessera::grad
