// Parameters of layers: they begin without memory, may share it, and are declared where they are
// registered.
//
// A layer creates its parameters with full sizes and no storage; loading, initialization or
// sharding fills them, so that no rank ever holds a model whole. Until then every access throws.
// This is the same state that a released unsharded parameter has ([Note: release] of
// fsdp/runtime/runtime.h).
// PlacedModule is a layer that says of each of its own where it lies beyond the data axes, how it
// begins, how files hold it; layers of one rank declare no placement. Next: declaration.h,
// tensor_region.h, linear.h, tessera/placement.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>

#include "nn/declaration.h"
#include "tessera/placement.h"

namespace tessera::nn {

/// An fp32 leaf that requires grad, with these sizes and a storage of 0 bytes. Touching its data is
/// an error that says "parameter has no data yet".
at::Tensor empty_parameter(at::IntArrayRef sizes);

/// Whether the tensor's storage holds its elements.
bool has_data(const at::Tensor& tensor);

/// Gives zeros to every parameter of the module that has no data: for use without sharding.
void materialize(const torch::nn::Module& module);

/// Lets `alias` use the storage of `owner`: two leaves over one memory, so that each use of a tied
/// weight has a gradient of its own ([Note: one leaf a use] of grad/leaf.h). `alias` stays the
/// tensor object it is; what it held is dropped. Errors: kContract if sizes or dtypes differ.
void tie(const at::Tensor& alias, const at::Tensor& owner);

class PlacedModule : public torch::nn::Module, public DeclaresLayouts {
 public:
  /// Declares the same placement for every parameter, instead of what was declared.
  virtual void declare_all(const ParameterLayout& layout) {
    for (auto& [name, declaration] : declarations_) declaration.layout = layout;
  }
  ParameterLayout layout_of(const std::string& parameter) const override {
    return declaration_of(parameter).layout;
  }
  /// Sets other initial values; `scale`: Declaration::init_scale.
  void begin_with(const std::string& parameter, InitKind init, double scale = 1.0) {
    Declaration& declaration = declarations_[parameter];
    declaration.init = init;
    declaration.init_scale = scale;
  }
  /// Returns the declaration of `parameter`, named as layout_of names it.
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
  /// Declares another placement than the one that it was registered with.
  void declare(const std::string& parameter, ParameterLayout layout) {
    declarations_[parameter].layout = std::move(layout);
  }

 private:
  std::map<std::string, Declaration> declarations_;
};

/// Declares for the module and all inside it that declare layouts.
inline void declare_all(torch::nn::Module& module, const ParameterLayout& layout) {
  for (const auto& each : module.modules()) {
    if (auto* placed = dynamic_cast<PlacedModule*>(each.get())) placed->declare_all(layout);
  }
}

}  // namespace tessera::nn
