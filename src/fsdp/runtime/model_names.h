// The names of a model's tensors, worked out over all of its modules, whichever of them are units.
//
// A unit's contracts name what its module shows when that is sharded, and a tensor that several
// modules register is of the unit that was sharded first. Dicts, checkpoints, named_parameters(),
// named_buffers(), visits of whole tensors and patterns of optimizers go by the names here, so that
// they are the same in every cut of a model. Next: tessera/state_dict.h.
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
/// modules: libtorch's named_parameters() gives the same ones. The first is the canonical one. What
/// came with a contract (ShardOptions::contracts) has the names there.
class ModelNames {
 public:
  explicit ModelNames(const ShardedBase& model);

  std::vector<std::string> of(const GradContract& contract) const;
  /// The contract with these names: patterns are matched against it.
  GradContract named(const GradContract& contract) const;
  /// Names of a buffer; empty where no module of the handle shows it, or a contract came with it.
  std::vector<std::string> of(const at::Tensor& buffer) const;
  /// Those of `model` that dicts and checkpoints hold, each tensor once.
  std::vector<NamedBuffer> stored_buffers(const ShardedBase& model) const;

 private:
  void add(const Unit& unit, const std::string& prefix);

  std::map<const GradContract*, std::vector<std::string>> parameters_;
  std::map<const at::TensorImpl*, std::vector<std::string>> buffers_;
};

}  // namespace tessera::fsdp
