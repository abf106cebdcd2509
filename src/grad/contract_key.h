// The bucket key of a contract: the fields that decide over the bytes of a flat buffer and over its
// collectives. Next: layout/bucket_plan.h.
#pragma once

#include "layout/bucket_plan.h"
#include "tessera/contract.h"

namespace tessera {

/// Returns the key of a parameter's bucket. Frozen parameters have no gradient, so that gradient
/// dtypes do not split their buckets.
inline layout::BucketKey key_of(const GradContract& contract) {
  layout::BucketKey key;
  key.storage = contract.storage.dtype;
  key.compute = contract.compute.dtype;
  key.rounding = contract.compute.rounding;
  key.trainable = contract.trainable;
  key.reductions = contract.reductions;
  if (contract.trainable) {
    key.accumulate = contract.accumulate;
    key.reduce = contract.reduce;
    key.final = contract.final;
  } else {
    key.reductions.copies.clear();
    key.replicated = contract.replicated();
    if (key.replicated) {
      key.reductions.shard_axes.clear();
      key.reductions.replica_axes.clear();
    }
    key.accumulate = key.reduce = key.final = key.compute;
  }
  return key;
}

/// Returns what a rank lays out of the parameter.
inline layout::PlanItem plan_item(const GradContract& contract) {
  return {contract.name, contract.local_numel(), key_of(contract)};
}

}  // namespace tessera
