// The names of a model's tensors, over all of its modules, whichever of them are units.
//
// A unit's contracts have the names that its module had when it was sharded, and a tensor that
// several modules register belongs to the unit that was sharded first. State dicts, checkpoints,
// named_parameters(), named_buffers(), visits of whole tensors and patterns of optimizers use the
// names of this file, which do not depend on how a model is split into units. Next:
// tessera/state_dict.h.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "fsdp/runtime/unit.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

struct NamedBuffer {
  std::vector<std::string> names;  ///< the canonical one first
  BufferView view;
};

/// All names under which the modules of a handle show a tensor, each once, in the order of the
/// modules, as in libtorch's named_parameters(). The first one is canonical. A parameter that came
/// with a contract (ShardOptions::contracts) has the names in that contract.
class ModelNames {
 public:
  explicit ModelNames(const ShardedBase& model);

  std::vector<std::string> of(const GradContract& contract) const;
  /// Returns the contract with these names, for matching with patterns.
  GradContract named(const GradContract& contract) const;
  /// Returns the names of a buffer; none where no module of the handle shows it, or where it came
  /// with a contract.
  std::vector<std::string> of(const at::Tensor& buffer) const;
  /// Returns the buffers of `model` that dicts and checkpoints hold, each tensor once.
  std::vector<NamedBuffer> stored_buffers(const ShardedBase& model) const;

 private:
  void add(const Unit& unit, const std::string& prefix);

  std::map<const GradContract*, std::vector<std::string>> parameters_;
  std::map<const at::TensorImpl*, std::vector<std::string>> buffers_;
};

}  // namespace tessera::fsdp
