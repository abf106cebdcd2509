// Causal self-attention with grouped key and value heads.
//
// Softmax is fp32; keys after a query's position do not exist. Batches without rows run forward and
// backward. Short symbols: B rows, T (new) positions, N all positions so far, G key/value heads, R
// query heads of each (H = G*R in all), D head_dim. Next: mla.h, mlp.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/attention/masked_attention.h"
#include "nn/context_region.h"
#include "nn/documents.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "nn/tensor_region.h"
#include "nn/token_mixer.h"

namespace tessera::nn {

/// q [B, G, T, R, D], k [B, G, T, 1, D] (both as rope_heads gives them), v [B, T, G*D] -> [B, T,
/// H*D]. The D of v, and of the result, may differ. The mask has no sinks: its scores have the
/// inputs' dtype.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale, const AttentionMask& mask = {});

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
  enum class QkNorm : std::uint8_t {
    kNo,
    kYes,       ///< of each head
    kAllHeads,  ///< of all heads together, those of other ranks too
  } qk_norm = QkNorm::kNo;
  double norm_eps = 0.0;
  enum class Sinks : std::uint8_t { kNo, kYes } sinks = Sinks::kNo;  ///< one a head, learned
  std::optional<std::int64_t> window = std::nullopt;  ///< as windowed_attention has it
  std::optional<std::int64_t> turned = std::nullopt;  ///< the first elements of a head; none = all
  TensorRegion region = {};
  ContextRegion context = {};
  std::int64_t all_kv_heads = 0;  ///< of all ranks of the region; read where it has several
  NormRounding norm_rounding = NormRounding::kBeforeWeight;  ///< of the q/k norm, as its factor
  NormFactor norm_factor = NormFactor::kWeight;
  /// q_proj gives a gate after the query of each head, whose sigmoid multiplies the head's result.
  enum class Gate : std::uint8_t { kNo, kYes } gate = Gate::kNo;
  std::optional<double> scale = std::nullopt;  ///< of scores; none = 1 / sqrt(head_dim)
  /// q, k and v are rows of one matrix, "qkv_proj"; the ranks divide the key and value heads then,
  /// and there is no gate.
  enum class Projections : std::uint8_t { kSeparate, kFused } projections = Projections::kSeparate;
};

class Attention : public TokenMixer {
 public:
  Attention(const AttentionOptions& options, std::shared_ptr<Rope> rope);
  using TokenMixer::forward;
  at::Tensor forward(const at::Tensor& x, const Documents& documents) override;
  /// The first call of a cache returns forward's bits.
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  struct Heads {
    at::Tensor q, k;  ///< as causal_attention takes them
    at::Tensor v;
    at::Tensor gate;  ///< [B, T, H*D], or undefined
  };
  void add_fused_projections();
  void add_norms();
  struct Products {
    at::Tensor q, k, v;  ///< [B, T, heads * D] each
    at::Tensor gate;     ///< as q, or undefined
  };
  Products products(const at::Tensor& x) const;
  Heads project(const at::Tensor& x, const RopeTable& table);
  /// Whether there are neither sinks nor keys beyond the window.
  bool is_plain(std::int64_t positions) const;
  at::Tensor attend(const Heads& heads, const Documents& documents) const;
  static at::Tensor gated(const at::Tensor& attended, const Heads& heads);
  double scale() const;

  AttentionOptions options_;
  std::shared_ptr<Rope> rope_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_;  ///< null where they are one
  std::shared_ptr<Linear> qkv_proj_;                  ///< null where they are separate
  std::shared_ptr<Linear> o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;  ///< null without q/k norm
  at::Tensor sinks_;                          ///< [heads], or undefined
};

}  // namespace tessera::nn
