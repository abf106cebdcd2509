// Cross entropy of next-token prediction as a sum and a count, never a mean; and the transforms of
// logits before it.
//
// Sums of parts can be added over micro-batches and ranks, and a batch without unmasked targets
// gives no NaN. Targets are aligned with the logits: targets[:, t] is what position t is to
// predict, -100 is ignored. Labels as Hugging Face has them are shifted first (next_token_targets).
// Where the vocabulary is cut over ranks, rank r of the axis owns tokens r V/size to (r + 1) V/size
// - 1, columns of the logits: no rank ever holds logits of the whole vocabulary, and three numbers
// a token are sent. Short symbols: B rows, T positions, V vocabulary. Next: embedding.h,
// ../parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/axis.h"

namespace tessera::nn {

inline constexpr std::int64_t kIgnoredLabel = -100;

/// labels [B, T] i64 -> targets [B, T]: labels[:, t + 1] at t, -100 at the last position. Column 0
/// of the labels is never used.
at::Tensor next_token_targets(const at::Tensor& labels);

/// Counts targets that are not -100. targets [B, T] i64 on the CPU.
std::int64_t count_kept(const at::Tensor& targets);

/// Soft-caps logits: cap * tanh(z / cap), which never leaves (-cap, cap). z [...] -> the same shape
/// and dtype. Backward needs the result only; z is released.
at::Tensor soft_cap(const at::Tensor& z, double cap);

/// While one lives, losses note what each of their rows adds, where its rows have a SamplePlace:
/// without gradient, in the order of the calls. It belongs to the thread that makes it; the last
/// one made gets the notes. Costs a look at one logit a token.
class RowLosses {
 public:
  struct Noted {
    std::int64_t first_row = 0;  ///< of the SamplePlace
    at::Tensor sums;             ///< [B] fp64
  };
  RowLosses();
  ~RowLosses();
  RowLosses(const RowLosses&) = delete;
  RowLosses& operator=(const RowLosses&) = delete;

  const std::vector<Noted>& noted() const { return noted_; }

  static bool wanted();
  /// losses [B, T]: one of each token, 0 where its target is ignored.
  static void note(const at::Tensor& losses);

 private:
  RowLosses* const outer_;
  std::vector<Noted> noted_;
};

enum class Logits : std::uint8_t {
  kKeep,
  kConsume,  ///< backward may write their gradient over them: nothing else may hold them
};

/// logits [B, T, V], targets [B, T] i64 -> [] fp32 (fp64 for fp64 logits), computed in fp32 from
/// logits. Errors: kFormat for a target outside 0..V-1 that is not -100 (check_range).
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             Logits use = Logits::kKeep);

struct VocabParallelLoss {
  parallel::Axis axis;
  std::string name = "loss";  ///< in errors about collectives
  Logits use = Logits::kKeep;
};

/// cross_entropy_sum of logits [B, T, V / size], targets [B, T] i64 the same on every rank.
/// Placement: S(2) -> I, the same bits on every rank; the gradient needs no communication.
/// Collective; bytes a rank sends: (size - 1) x 12 B T (24 for fp64). Errors: kFormat for a target
/// outside 0..V-1 that is not -100 (check_range).
at::Tensor vocab_parallel_cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                                            const VocabParallelLoss& options);

}  // namespace tessera::nn
