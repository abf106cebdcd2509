// The adapter of a linear layer: y + scale * B(A(dropout(x))), two thin matrices beside a frozen
// one.
//
// The product is computed in the adapter's dtype and the sum rounded once to the layer's result
// dtype, as peft does. Dropout takes no generator: which elements are dropped follows from (seed,
// step, layer, row of the global batch, position, column), so it is the same under every layout and
// in recomputation. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
// Short symbols: B rows, T positions, K inputs, N outputs, R rank. Next: linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"

namespace tessera::nn {

struct LoraOptions {
  std::int64_t rank = 0;
  double scale = 1.0;
  double dropout = 0.0;    ///< in [0, 1): of the adapter's input, while a SampleScope lives
  std::string layer = {};  ///< its name in the model, by which dropout is drawn
};

/// base [..., N], x [..., K], a [R, K], b [N, R] -> [..., N] in base's dtype. Where dropout is
/// drawn x is [B, T, K].
at::Tensor add_adapter(const at::Tensor& base, const at::Tensor& x, const at::Tensor& a,
                       const at::Tensor& b, const LoraOptions& options);

/// What one forward drops, as a value.
struct DropoutDraw {
  double probability = 0.0;
  std::uint64_t stream = 0;  ///< of seed, step and layer
  std::int64_t first_row = 0;
};
DropoutDraw dropout_draw(const LoraOptions& options, const SamplePlace& place);

/// 0 for an element that is dropped, else 1 / (1 - probability): [B, T, K].
at::Tensor dropout_factors(const DropoutDraw& draw, const std::vector<std::int64_t>& shape,
                           at::ScalarType dtype);

}  // namespace tessera::nn
