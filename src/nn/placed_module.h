// PlacedModule: a layer that declares what it registers: where each of its own parameters lies
// beyond the data axes, how it begins, how files hold it.
//
// Layers of one rank declare no placement. Next: declaration.h, tensor_region.h,
// tessera/placement.h.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>

#include "nn/declaration.h"
#include "nn/parameter.h"
#include "tessera/placement.h"

namespace tessera::nn {

class PlacedModule : public torch::nn::Module, public DeclaresLayouts {
 public:
  /// Says the same of every parameter's placement, instead of what was declared.
  virtual void declare_all(const ParameterLayout& layout) {
    for (auto& [name, declaration] : declarations_) declaration.layout = layout;
  }
  ParameterLayout layout_of(const std::string& parameter) const override {
    return declaration_of(parameter).layout;
  }
  /// `parameter` as layout_of has it.
  Declaration declaration_of(const std::string& parameter) const {
    const auto found = declarations_.find(parameter);
    return found == declarations_.end() ? Declaration{} : found->second;
  }

 protected:
  /// Registers a parameter of these sizes, of this rank, without data.
  at::Tensor add_parameter(const std::string& name, at::IntArrayRef sizes,
                           Declaration declaration) {
    declarations_[name] = std::move(declaration);
    return register_parameter(name, empty_parameter(sizes));
  }
  /// Another placement than the one that it was registered with.
  void declare(const std::string& parameter, ParameterLayout layout) {
    declarations_[parameter].layout = std::move(layout);
  }
  /// Other values to begin with.
  void begin_with(const std::string& parameter, InitKind init) {
    declarations_[parameter].init = init;
  }

 private:
  std::map<std::string, Declaration> declarations_;
};

/// Of the module and of all inside that declare layouts.
inline void declare_all(torch::nn::Module& module, const ParameterLayout& layout) {
  for (const auto& each : module.modules()) {
    if (auto* placed = dynamic_cast<PlacedModule*>(each.get())) placed->declare_all(layout);
  }
}

}  // namespace tessera::nn
