// set_trainable(): freezes and unfreezes parameters of a sharded model between steps.
//
// It does what PyTorch's `requires_grad_` does under FSDP2, for layouts in which frozen and trained
// parameters are in separate buckets (docs/communication.md). The parameters of the affected units
// move to their new places, from rank to rank and range by range; no rank holds a whole parameter
// for it. docs/fsdp2.md compares it with FSDP2. Next: optim.h.
#pragma once

#include <string>
#include <vector>

#include "tessera/contract.h"
#include "tessera/shard.h"

namespace tessera {

class Optimizer;

/// One change of set_trainable().
struct TrainableChange {
  std::vector<std::string> match;  ///< patterns as PrecisionRule::match; each matches a parameter
  bool trainable = true;           ///< true = unfreeze, false = freeze
  FrozenAs frozen_as = FrozenAs::kShard;  ///< how the frozen ones are kept
};

/// Applies the changes; the last one that matches a parameter counts. Storage and compute dtypes
/// and buffers stay, except that a parameter that becomes whole on every rank is stored in its
/// compute dtype. The rest of the contract (master, final, decay) is resolved again. A unit without
/// changes keeps its memory. Collective: the same changes on all ranks, between steps.
///
/// `model` is the outermost handle. `follow` has every Optimizer that was made for it or for inner
/// handles. Each continues with the parameters that it was made for, and one that is left out
/// refuses its next step. Optimizer state moves with its parameter. A parameter that is frozen as a
/// shard keeps its state until it is trained again, as in torch.optim; a replicated one loses it. A
/// parameter that is trained for the first time starts at step 0. Checkpoints hold no optimizer
/// state of frozen parameters. Optimizers of torch.optim refer to the old shards: make new ones.
///
/// Bytes that a rank sends: the elements of its shards, and of their optimizer state, that other
/// ranks need. Memory: the shards and state of one unit at a time, twice.
///
/// Errors: kUsage while a forward waits for its backward, with gradients on the shards (call
/// zero_grad() first), and with unreduced gradients of micro-batches; kContract for patterns that
/// match nothing, for parameters that cannot be trained (not floating; float16 without loss
/// scaling) or whose values a narrower replicated copy cannot hold, for a model without trainable
/// parameters, and for changes or optimizers that differ between ranks. These leave everything as
/// it was. After an error of the wire (kComm) values are lost, and the run continues from a
/// checkpoint.
void set_trainable(ShardedBase& model, const std::vector<TrainableChange>& changes,
                   const std::vector<Optimizer*>& follow = {});

}  // namespace tessera
