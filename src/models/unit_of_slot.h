// From a slot of a model to what its user sees of it. Private to the models' sources.
#pragma once

#include <string>
#include <utility>

#include "fsdp/slot.h"
#include "models/language_model.h"

namespace tessera::models {

/// The slot must outlive the unit.
template <class M>
ModelUnit unit_of(fsdp::Slot<M>& slot, std::string name) {
  return {.name = std::move(name),
          .module = slot.module(),
          .shard = [&slot](const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options) -> std::shared_ptr<ShardedBase> {
            return slot.shard(mesh, policy, options);
          }};
}

}  // namespace tessera::models
