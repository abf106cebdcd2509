// DeltaNet: linear attention by the gated delta rule, the layer of Qwen3-Next and Qwen3.5 that has
// a state of fixed size in the place of keys and values.
//
// Products give queries, keys, values and gates, and the decay and the learning rate of each value
// head; a short convolution mixes the first three with the few positions before; the delta rule
// (delta_rule.h) reads and writes the state; a gated norm of each head precedes the last product.
// Ranks of the tensor axis divide the key heads: each has the value heads that read with them, so
// that states never meet. Documents begin with an empty state and without context. A_log and
// dt_bias are used in fp32 at least. Source: Yang et al., "Gated Delta Networks" (arXiv
// 2412.06464); transformers' Qwen3-Next.
//
// Short symbols: B rows, T positions, G key heads, H value heads (a multiple of G), K and V their
// dims, those of this rank. Next: delta_rule.h, short_convolution.h, gated_rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "nn/linear.h"
#include "nn/state/conv1d.h"
#include "nn/state/delta_rule.h"
#include "nn/state/gated_rms_norm.h"
#include "nn/tensor_region.h"
#include "nn/token_mixer.h"

namespace tessera::nn {

/// Heads are those of this rank.
struct DeltaNetOptions {
  std::int64_t hidden_size = 0;
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t conv_width = 0;
  double norm_eps = 0.0;
  TensorRegion region = {};
  enum class Projections : std::uint8_t {
    kByKeyHead,  ///< "in_proj_qkvz", "in_proj_ba": the rows of a key head stand together
    kSeparate,   ///< "in_proj_qkv" (all queries, all keys, all values), "_z", "_b" and "_a"
  } projections = Projections::kByKeyHead;
};

class DeltaNet : public TokenMixer {
 public:
  explicit DeltaNet(const DeltaNetOptions& options);
  using TokenMixer::forward;
  at::Tensor forward(const at::Tensor& x, const Documents& documents) override;
  /// As forward, by steps of one position where x has one.
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  struct Projected {
    at::Tensor qkv;   ///< [B, T, 2*G*K + H*V], all queries, all keys, all values
    at::Tensor z;     ///< [B, T, H, V], the gates of the norm
    at::Tensor b, a;  ///< [B, T, H], before the sigmoid and the softplus
  };
  void add_projections(std::int64_t keys, std::int64_t values);
  Projected project(const at::Tensor& x) const;
  Projected project_separately(const at::Tensor& x) const;
  /// Takes the result of the convolution for `projected.qkv`.
  DeltaInputs inputs_of(const at::Tensor& mixed, const Projected& projected) const;
  at::Tensor normed(const at::Tensor& core, const at::Tensor& z) const;

  DeltaNetOptions options_;
  at::Tensor dt_bias_, a_log_;  // [H]
  std::shared_ptr<Conv1d> conv1d_;
  std::shared_ptr<Linear> in_proj_qkvz_, in_proj_ba_;  ///< null where they are separate
  std::shared_ptr<Linear> in_proj_qkv_, in_proj_z_, in_proj_b_,
      in_proj_a_;  ///< null where they are fused
  std::shared_ptr<Linear> out_proj_;
  std::shared_ptr<GatedNorm> norm_;
};

}  // namespace tessera::nn
