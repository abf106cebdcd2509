// PlacedModule: a layer that says where its own parameters lie beyond the data axes.
//
// Layers of one rank declare nothing. Next: tensor_region.h, tessera/placement.h.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>

#include "tessera/placement.h"

namespace tessera::nn {

class PlacedModule : public torch::nn::Module, public DeclaresLayouts {
 public:
  /// Says the same of every parameter, in the place of what was declared.
  virtual void declare_all(const ParameterLayout& layout) {
    for (const auto& parameter : named_parameters(/*recurse=*/false)) {
      layouts_[parameter.key()] = layout;
    }
  }
  ParameterLayout layout_of(const std::string& parameter) const override {
    const auto found = layouts_.find(parameter);
    return found == layouts_.end() ? ParameterLayout{} : found->second;
  }

 protected:
  void declare(const std::string& parameter, ParameterLayout layout) {
    layouts_[parameter] = std::move(layout);
  }

 private:
  std::map<std::string, ParameterLayout> layouts_;
};

/// Of the module and of all inside that declare layouts.
inline void declare_all(torch::nn::Module& module, const ParameterLayout& layout) {
  for (const auto& each : module.modules()) {
    if (auto* placed = dynamic_cast<PlacedModule*>(each.get())) placed->declare_all(layout);
  }
}

}  // namespace tessera::nn
