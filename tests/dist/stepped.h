// A model that is trained without a forward, so that any layout trains it alike.
#pragma once

#include "base/hash.h"
#include "grad/torch_dtype.h"
#include "support/plain.h"
#include "tessera/optim.h"
#include "tessera/state_dict.h"

namespace tessera::test {

/// One update by gradients that depend on parameter, step and element of the whole only.
inline void step_by_name(const ShardedBase& model, Optimizer& optimizer, int number) {
  for (const auto& view : model.shards()) {
    if (!view.contract->trainable) continue;
    const auto seed = hash_bytes(view.contract->name, static_cast<std::uint64_t>(number));
    view.shard.mutable_grad() = seeded(seed, {view.contract->numel()})
                                    .narrow(0, view.begin, view.end - view.begin)
                                    .to(to_scalar_type(view.contract->final))
                                    .clone();
  }
  optimizer.step();
}

/// Everything that a checkpoint holds of the stages of this rank, whole. Collective.
inline Tensors whole_state(const ShardedBase& model, const Optimizer& optimizer) {
  Tensors values;
  for (auto& entry : state_dict(model, StateDictKind::kFull)) values[entry.name] = entry.values;
  for (const auto& state : optimizer_state_dict(model, optimizer).parameters) {
    values[state.parameter + " steps"] = here(at::scalar_tensor(state.steps, at::kLong));
    for (const auto& [name, kept] : state.kept) values[state.parameter + " " + name] = kept;
  }
  return values;
}

}  // namespace tessera::test
