// Leaf: one tensor object of the user's module that shows an unsharded parameter, and the hook that
// takes its gradients away. [Note: one leaf a use]
//
// The engine sums all uses of one AccumulateGrad node in the raw dtype before any hook sees them
// (bf16 256, 1, -256 gives 0). So tied parameters are several leaves over one storage, and every
// forward of a unit gives its leaves new AccumulateGrad nodes, before it and, where the code around
// the unit uses them too, behind it: contributions meet in the slot, unrounded. Only several uses of one tensor object inside one forward still arrive as autograd's
// own sum; the contract says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "grad/sink.h"
#include "tessera/contract.h"

namespace tessera::grad {

/// Deleted as what it is: who shards knows more of it.
struct Leaf {
  virtual ~Leaf() = default;

  at::Tensor tensor;
  std::string name;                  ///< as the user's module calls it, relative to the unit
  GradContract* contract = nullptr;  ///< of its parameter; null without one
  GradSink* sink = nullptr;          ///< null until the unit has joined a runtime
  SlotId slot = 0;
  std::uint32_t gathered_version = 0;  ///< of the tensor, when its values were last gathered
  bool uses_counted = false;           ///< how often one forward uses it, in the first backward
};

/// Prepares a tensor: raw gradients of any dtype go to the leaf's sink and nowhere else; `.grad`
/// becomes a tensor that throws when an optimizer accesses it. Frozen leaves only get the mark of
/// their owner.
void install(const std::shared_ptr<Leaf>& leaf, bool trainable);
/// Changes whether an installed leaf takes gradients.
void set_trainable(const Leaf& leaf, bool trainable);
/// Gives the leaf a new AccumulateGrad node for the forward that begins.
void renew_accumulator(const Leaf& leaf);
/// Whether anybody listens to its gradient: a hook on the tensor, after its accumulation, or on the
/// node that accumulates. Of a tensor that is no leaf of ours.
bool has_hooks(const at::Tensor& tensor);
/// In the backward of a node that uses the leaf: whether nothing else of that forward does, nobody
/// else listens, and no gradient goes elsewhere than to leaves. Else its gradient is autograd's to
/// add up, or to hand on.
bool arrives_alone(const Leaf& leaf);
/// The leaf that a tensor already is, or null.
std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor);

}  // namespace tessera::grad
