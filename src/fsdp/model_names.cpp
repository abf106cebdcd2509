// Names of what several modules show, worked out over the whole model.
//
// A parameter that two modules register belongs to the unit around both, and was named by the module
// that was sharded first; a buffer is of each unit that shows it. In the model both have one list of
// names, in the order of its modules, whichever of these are units: so a state dict of one cut is one
// of every other.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/shard.h"

namespace tessera {

class ShardedBase::ModelNames {
 public:
  void visit(const ShardedBase& handle) {
    if (handle.canonical_name_) return;  // its names are the caller's
    for (const auto& inner : handle.inner_)
      by_module_[inner.handle->held_.get()] = inner.handle.get();
    visit(*handle.held_, handle, "");
  }

  void give(fsdp::Parameter& parameter) const {
    if (parameter.place_in_model >= 0) return;  // resolved for the whole model
    auto& contract = parameter.contract;
    const auto found = parameters_.find(&parameter);
    if (found == parameters_.end() || found->second.size() < 2 ||
        std::ranges::count(found->second, contract.name) == 0) {
      return;
    }
    contract.name = found->second.front();
    contract.aliases.assign(found->second.begin() + 1, found->second.end());
    parameter.is_named_by_model = true;
  }

  void give(fsdp::Buffer& buffer) const {
    const auto found = buffers_.find(buffer.tensor.unsafeGetTensorImpl());
    if (buffer.given || found == buffers_.end()) return;
    buffer.meta.name = buffer.contract.name = found->second;
  }

 private:
  void visit(torch::nn::Module& module, const ShardedBase& handle, const std::string& path) {
    if (!seen_.insert(&module).second) return;
    const std::string& unit = handle.unit_->name();
    const std::string before = unit.empty() ? path : unit + "." + path;
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const auto leaf = entry.value().defined() ? fsdp::find_leaf(entry.value()) : nullptr;
      if (leaf && leaf->owner != nullptr) parameters_[leaf->owner].push_back(before + entry.key());
    }
    for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
      if (entry.value().defined()) {
        buffers_.emplace(entry.value().unsafeGetTensorImpl(), before + entry.key());
      }
    }
    for (const auto& entry : module.named_children()) {
      const auto sharded = std::dynamic_pointer_cast<ShardedBase>(entry.value());
      const auto held = by_module_.find(entry.value().get());
      if (sharded) {
        visit(*sharded);
      } else if (held != by_module_.end()) {
        visit(*held->second);
      } else {
        visit(*entry.value(), handle, path + entry.key() + ".");
      }
    }
  }

  std::set<const torch::nn::Module*> seen_;
  std::map<const torch::nn::Module*, const ShardedBase*> by_module_;
  std::map<const fsdp::Parameter*, std::vector<std::string>> parameters_;  // in their order
  std::map<const at::TensorImpl*, std::string> buffers_;                   // the first one
};

void ShardedBase::name_by_model() {
  ModelNames names;
  names.visit(*this);
  for (auto* unit : runtime_->units()) {
    for (const auto& parameter : unit->parameters()) names.give(*parameter);
    for (auto& buffer : unit->buffers) names.give(buffer);
  }
}

}  // namespace tessera
