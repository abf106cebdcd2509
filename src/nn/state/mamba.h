// Mamba: the state-space layer of Mamba-2, which has a state of fixed size in the place of keys and
// values.
//
// One product gives the gate, the inputs x, B and C of the state, and its step dt; a short
// convolution mixes x, B and C with the few positions before; the state-space dual (state_space.h)
// reads and writes the state; a norm of each group of heads, behind the gate, precedes the last
// product. Ranks of the tensor axis divide the groups: each has the heads of its own, so that
// states and norms never meet. Documents begin with an empty state and without context. A_log,
// dt_bias and D are used in fp32 at least. Source: Dao, Gu, "Transformers are SSMs" (arXiv
// 2405.21060); transformers' Nemotron-H.
//
// Short symbols: B rows, T positions, H heads, P their dim, G groups, N state size, those of this
// rank. Next: state_space.h, conv1d.h, gated_rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/linear.h"
#include "nn/state/conv1d.h"
#include "nn/state/gated_rms_norm.h"
#include "nn/state/state_space.h"
#include "nn/tensor_region.h"
#include "nn/token_mixer.h"

namespace tessera::nn {

/// Heads and groups are those of this rank.
struct MambaOptions {
  std::int64_t hidden_size = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t groups = 0;
  std::int64_t state_size = 0;
  std::int64_t conv_width = 0;
  Bias conv_bias = Bias::kYes;
  std::int64_t chunk = 0;
  double least_step = 0.0;  ///< of dt
  StepRange first_steps = {};
  /// out_proj begins uniform within 1 / sqrt(inputs * this), in a model of so many layers; none: as
  /// other matrices.
  std::optional<std::int64_t> scaled_by_layers = std::nullopt;
  double norm_eps = 0.0;
  TensorRegion region = {};
};

class Mamba : public TokenMixer {
 public:
  explicit Mamba(const MambaOptions& options);
  using TokenMixer::forward;
  at::Tensor forward(const at::Tensor& x, const Documents& documents) override;
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  struct Projected {
    at::Tensor gate;  ///< [B, T, H*P]
    at::Tensor xbc;   ///< [B, T, H*P + 2*G*N], before the convolution
    at::Tensor dt;    ///< [B, T, H], before the bias and the softplus
  };
  std::int64_t inner_size() const { return options_.heads * options_.head_dim; }
  std::int64_t group_size() const { return options_.groups * options_.state_size; }
  Projected project(const at::Tensor& x) const;
  /// Takes the result of the convolution for `projected.xbc`.
  StateSpaceInputs inputs_of(const at::Tensor& mixed, const Projected& projected) const;
  at::Tensor normed(const at::Tensor& core, const at::Tensor& gate) const;

  MambaOptions options_;
  at::Tensor dt_bias_, a_log_, d_;  // [H]
  std::shared_ptr<Conv1d> conv1d_;
  std::shared_ptr<Linear> in_proj_, out_proj_;
  std::shared_ptr<GatedNorm> norm_;
};

}  // namespace tessera::nn
