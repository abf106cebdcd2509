// set_trainable: freezes and unfreezes parameters of a sharded model between steps.
//
// What PyTorch's `requires_grad_` does to parameters under FSDP2, done for layouts in which frozen
// and trained parameters lie in buckets of their own (docs/communication.md): the parameters of the
// units concerned move to their new places, rank to rank, stretch by stretch; no rank holds a whole
// parameter for it. docs/fsdp2.md says what FSDP2 does. Next: optim.h.
#pragma once

#include <string>
#include <vector>

#include "tessera/contract.h"
#include "tessera/shard.h"

namespace tessera {

class Optimizer;

struct TrainableChange {
  std::vector<std::string> match;  ///< patterns as PrecisionRule::match, each must match something
  bool trainable = true;
  FrozenAs frozen_as = FrozenAs::kShard;  ///< of those that it freezes
};

/// Applies the changes, the last one that matches a parameter counts. Collective: the same changes
/// on all ranks, between steps. Storage and compute dtypes stay (but what becomes whole on every
/// rank is stored as it computes from then on), and so do buffers; the rest of the contract
/// (master, final, decay) is resolved anew. A unit of which nothing changes keeps its memory.
///
/// `model` is the outermost handle. `follow`: every Optimizer made for it or for handles inside,
/// each of which goes on with the parameters that it was made for; one that is left out refuses its
/// next step. What they keep of a parameter moves with it. A parameter frozen as a shard keeps that
/// for the time when it is trained again, as in torch.optim, while one that is replicated loses it;
/// one that is trained for the first time begins at step 0. Checkpoints hold nothing of what an
/// optimizer keeps of frozen parameters. Optimizers of torch.optim hold state for the old shards:
/// make them anew.
///
/// Bytes that a rank sends: what others need of its shards and of what `follow` keeps for them.
/// Memory: one unit's shards and state twice at a time.
///
/// Errors: kUsage with a forward that waits for its backward, with gradients on the shards
/// (zero_grad() first) or in slots of micro-batches without sync; kContract for patterns that match
/// nothing, parameters that cannot be trained (not floating; float16 without loss scaling) or hold
/// values that a narrower replicated copy cannot, nothing left to train, changes or optimizers that
/// differ between ranks. All before anything moved; after an error of the wire (kComm) values are
/// lost, and the run goes on from a checkpoint.
void set_trainable(ShardedBase& model, const std::vector<TrainableChange>& changes,
                   const std::vector<Optimizer*>& follow = {});

}  // namespace tessera
