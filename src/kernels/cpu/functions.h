// The fused forms with their derivatives, for tensors that have kernels (dispatch.h).
//
// Their composite twins stand in nn/; the pickers there choose. Meaning and shapes: nn/*.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "nn/gated.h"
#include "nn/loss.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "nn/windowed_attention.h"

namespace tessera::nn::cpu {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps);
at::Tensor rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                      const RopeTable& table);
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale);
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale);
/// For every dtype: what is not fp32 or wider is widened.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionReach& reach, double scale);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor swiglu_halves(const at::Tensor& both);
at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options);
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding);
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, Logits use);

}  // namespace tessera::nn::cpu
