// A layer's forward, kept for backward or recomputed there. Private to the models' sources.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/recompute.h"

namespace tessera::models {

/// A tensor of a body's inputs that may be left out.
inline std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

/// Whether a backward comes through `layer`: a frozen tower leaves no graph, and is never run
/// again.
inline bool wants_gradient(const torch::nn::Module& layer, const std::vector<at::Tensor>& inputs) {
  const auto wants = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (!at::GradMode::is_enabled()) return false;
  if (std::any_of(inputs.begin(), inputs.end(), wants)) return true;
  const auto parameters = layer.parameters();
  return std::any_of(parameters.begin(), parameters.end(), wants);
}

/// Runs body(inputs) of `layer`, a tensor or several; `layer` lives as long as the graph if a
/// shared pointer holds it.
template <class Body>
auto recomputed(torch::nn::Module& layer, RecomputeMode mode, const std::vector<at::Tensor>& inputs,
                Body body) {
  using Result = decltype(body(inputs));
  if (mode == RecomputeMode::kNone || !wants_gradient(layer, inputs)) return body(inputs);
  std::function<Result(const std::vector<at::Tensor>&)> run =
      [owner = layer.weak_from_this().lock(),
       body = std::move(body)](const std::vector<at::Tensor>& all) { return body(all); };
  return checkpoint(std::move(run), inputs, mode);
}

}  // namespace tessera::models
