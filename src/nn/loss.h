// Cross entropy of next-token prediction as a sum and a count, never a mean.
//
// Sums of parts can be added over micro-batches and ranks, and no kept label is not NaN. Position t
// predicts labels[t+1]; column 0 of the labels is never used; -100 is ignored. Short symbols: B rows,
// T positions, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

inline constexpr std::int64_t kIgnoredLabel = -100;

/// Labels that count: those of columns 1..T-1 that are not -100. labels [B, T] i64 on the CPU.
std::int64_t count_kept(const at::Tensor& labels);

enum class Logits : std::uint8_t {
  kKeep,
  kConsume,  ///< backward may write their gradient over them: nobody else may hold them
};

/// logits [B, T, V], labels [B, T] i64 -> [] fp32 (fp64 for fp64 logits), computed in fp32 from logits.
/// Errors: kFormat for a label outside 0..V-1 that is not -100.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels,
                             Logits use = Logits::kKeep);

/// The same out of ATen operations.
at::Tensor cross_entropy_sum_composite(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace tessera::nn
