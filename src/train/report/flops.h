// Floating-point operations of training on one token, the usual estimate. Pure.
#pragma once

#include <cstdint>

namespace tessera::train {

struct ModelSize {
  std::int64_t active_parameters = 0;  ///< non-embedding, those that one token uses
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
};

/// 6 x active parameters (forward and backward of every product) + 12 x layers x heads x head_dim x
/// seq (attention scores and values). Source: Chowdhery and others, PaLM, appendix B.
double flops_per_token(const ModelSize& size, std::int64_t seq_len);

}  // namespace tessera::train
