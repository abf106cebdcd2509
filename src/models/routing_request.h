// RoutingRequest and RouterLoad: what a forward asks of its routers besides, and what they answer.
//
// Short symbols: M tokens, E experts, K experts a token. Next: moe_layer.h, language_model.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::models {

enum class RouterStatistics : std::uint8_t {
  kNone,
  kCounts,            ///< how many tokens each expert gets
  kAndProbabilities,  ///< and the routers' probabilities, as the auxiliary loss needs them
};

struct RoutingRequest {
  std::optional<at::Tensor> imposed;  ///< [M, K] i64 in the place of the layer's own choice
  RouterStatistics statistics = RouterStatistics::kNone;

  template <class F>
  void visit_tensors(F&& f) {
    if (imposed) f(*imposed);
  }
};

/// Sums over the tokens of one forward on this rank; undefined where nobody asked, or in a layer
/// without experts.
struct RouterLoad {
  at::Tensor counts;         ///< [E] i64: tokens that chose the expert
  at::Tensor probabilities;  ///< [E] fp32, of the softmax over all experts; with a gradient

  template <class F>
  void visit_tensors(F&& f) {
    f(counts);
    f(probabilities);
  }
};

}  // namespace tessera::models
