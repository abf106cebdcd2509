// Routing: which experts a token goes to, and with which weights.
//
// The router's scores come from the family; what is common is here: softmax over all experts, the
// best k, weights that sum to 1. Everything is fp32 from the softmax on (fp64 for fp64 scores).
// Gradients flow through the weights, never through the choice. Short symbols: M tokens, E experts,
// K experts a token. Next: experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::moe {

struct Routing {
  at::Tensor indices;        ///< [M, K] i64, ascending: a token meets an expert at most once
  at::Tensor weights;        ///< [M, K]
  at::Tensor probabilities;  ///< [M, E]
};

/// scores [M, E] -> softmax, the K largest, weights divided by their sum. `imposed` [M, K] i64
/// takes the place of the choice, in any order. Errors: kFormat for imposed indices of another
/// shape, outside 0..E-1, or twice in a row.
Routing route(const at::Tensor& scores, std::int64_t experts_per_token,
              const std::optional<at::Tensor>& imposed);

}  // namespace tessera::moe
