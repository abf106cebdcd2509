// From a slot of a model to what its user sees of it. Private to the models' sources.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "grad/slot.h"
#include "models/language_model.h"

namespace tessera::models {

/// The slot must outlive the unit.
template <class M>
ModelUnit unit_of(grad::Slot<M>& slot, std::string name) {
  return {.name = std::move(name),
          .module = slot.module(),
          .shard = [&slot](const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options) -> std::shared_ptr<ShardedBase> {
            auto handle = std::make_shared<Sharded<M>>(slot.module(), mesh, policy, options);
            slot.call_through(handle);
            return handle;
          }};
}

}  // namespace tessera::models
