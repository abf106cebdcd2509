// Causal self-attention with grouped key and value heads.
//
// Softmax is fp32; keys behind a query's position do not exist. Batches without rows run forward
// and backward. Short symbols: B rows, T positions, G key/value heads, R query heads of each (H =
// G*R in all), D head_dim. Next: mlp.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/linear.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "nn/self_attention.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

/// q [B, G, T, R, D], k [B, G, T, 1, D] (both as rope_heads gives them), v [B, T, G*D] -> [B, T,
/// H*D]. The D of v, and of the result, may be another.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale);

/// Without a gradient: q [B, G, T, R, D] of the last T of the N positions that keys and values
/// [B, G, N, D] hold -> [B, T, H*D]. Sums of one query lie in another order than in
/// causal_attention where the products' shapes differ.
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale);

/// Heads are those of this rank.
struct AttentionOptions {
  std::int64_t hidden_size = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  Bias bias = Bias::kNo;                           ///< of q, k and v, and of o by default
  std::optional<Bias> output_bias = std::nullopt;  ///< of o; none = as the others
  enum class QkNorm : std::uint8_t { kNo, kYes } qk_norm = QkNorm::kNo;
  double norm_eps = 0.0;
  enum class Sinks : std::uint8_t { kNo, kYes } sinks = Sinks::kNo;  ///< one a head, learned
  std::optional<std::int64_t> window = std::nullopt;  ///< as windowed_attention has it
  TensorRegion region = {};
  std::int64_t all_kv_heads = 0;  ///< of all ranks of the region; read where it has several
};

class Attention : public SelfAttention {
 public:
  Attention(const AttentionOptions& options, std::shared_ptr<Rope> rope);
  at::Tensor forward(const at::Tensor& x) override;
  bool can_decode() const override { return true; }
  /// The first call of a cache gives forward's bits.
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  struct Heads {
    at::Tensor q, k;  ///< as causal_attention takes them
    at::Tensor v;
  };
  Heads project(const at::Tensor& x, const RopeTable& table);
  /// Neither sinks nor keys beyond the window.
  bool is_plain(std::int64_t positions) const;
  at::Tensor attend(const Heads& heads) const;
  double scale() const;

  AttentionOptions options_;
  std::shared_ptr<Rope> rope_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;  ///< null without q/k norm
  at::Tensor sinks_;                          ///< [heads], or undefined
};

}  // namespace tessera::nn
