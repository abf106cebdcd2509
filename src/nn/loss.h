// Cross entropy of next-token prediction as a sum and a count, never a mean.
//
// Sums of parts can be added over micro-batches and ranks, and no kept label is not NaN. Targets
// are aligned with the logits: targets[:, t] is what position t is to predict, -100 is ignored.
// Labels as Hugging Face has them are shifted first (next_token_targets). Short symbols: B rows, T
// positions, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

inline constexpr std::int64_t kIgnoredLabel = -100;

/// labels [B, T] i64 -> targets [B, T]: labels[:, t + 1] at t, -100 at the last position. Column 0
/// of the labels is never used.
at::Tensor next_token_targets(const at::Tensor& labels);

/// Targets that are not -100. targets [B, T] i64 on the CPU.
std::int64_t count_kept(const at::Tensor& targets);

enum class Logits : std::uint8_t {
  kKeep,
  kConsume,  ///< backward may write their gradient over them: nobody else may hold them
};

/// logits [B, T, V], targets [B, T] i64 -> [] fp32 (fp64 for fp64 logits), computed in fp32 from
/// logits. Errors: kFormat for a target outside 0..V-1 that is not -100.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             Logits use = Logits::kKeep);

}  // namespace tessera::nn
