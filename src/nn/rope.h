// Rotary position embedding over pairs (x[i], x[i + D/2]), or over neighbours (x[2i], x[2i + 1]),
// with the `llama3` and `yarn` stretching of frequencies and the `proportional` kind that turns
// only the first pairs.
//
// Frequencies and tables are fp32; only the finished cos and sin are rounded to the activation's
// dtype. The q/k norm of Qwen3 is taken along: both work on one head of one position. Short
// symbols: B rows, T positions, H heads, D head_dim. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "nn/rms_norm.h"

namespace tessera::nn {

/// Stretches long wavelengths by `factor`, keeps short ones, blends between.
struct Llama3Scaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  std::int64_t original_max_position_embeddings = 0;
};

/// Slows a pair by `factor` where it turns less than `beta_slow` times in the original context,
/// not where more than `beta_fast` times, blends between, linearly over the pairs' numbers.
struct YarnScaling {
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::int64_t original_max_position_embeddings = 0;
  bool truncate = true;  ///< the two borders are rounded outwards to whole numbers
};

struct RopeOptions {
  std::int64_t head_dim = 0;
  double theta = 10000.0;
  std::optional<Llama3Scaling> llama3 = std::nullopt;
  std::optional<YarnScaling> yarn = std::nullopt;
  double table_factor = 1.0;  ///< of cos and sin, in fp32 before they are rounded
  /// `proportional`: the first so many pairs turn, all others pass unchanged; frequencies are those
  /// of the whole head, divided by `factor`.
  std::optional<std::int64_t> turned_pairs = std::nullopt;
  double factor = 1.0;
};

/// fp32 [D/2].
at::Tensor inverse_frequencies(const RopeOptions& options);

/// cos and sin [T, D/2] of positions 0..T-1.
struct RopeTable {
  at::Tensor cos;
  at::Tensor sin;
};

/// The tables of one model, kept per dtype for the longest sequence seen. No parameter, no buffer.
/// Threads: one at a time.
class Rope {
 public:
  explicit Rope(const RopeOptions& options);
  RopeTable table(std::int64_t positions, at::ScalarType dtype, at::Device device);

 private:
  RopeOptions options_;
  at::Tensor frequencies_;  // made with the first table: a model that is only described needs none
  std::map<std::pair<at::ScalarType, std::int64_t>, RopeTable> tables_;
};

/// The norm of each head in front of rope (Qwen3), if the weight is defined.
struct HeadNorm {
  at::Tensor weight;  ///< [D]
  double eps = 0.0;
  NormRounding rounding = NormRounding::kBeforeWeight;
};

/// H heads, of which R in a row share a key and value head (R = 1 for keys themselves).
struct HeadLayout {
  std::int64_t heads = 0;
  std::int64_t repeat = 1;
};

/// x [B, T, H*D] -> norm of each head if asked, then rotated, in x's dtype: [B, H/R, T, R, D]
/// contiguous, so that all rows that meet one key head lie together, ordered by position.
at::Tensor rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                      const RopeTable& table);

/// Neighbours (x[2i], x[2i + 1]) turned, in place and order: x [B, T, H, D] with a table in fp32
/// (fp64 for fp64) -> the same shape, rounded once to x's dtype. Out of ATen operations.
at::Tensor turn_neighbours(const at::Tensor& x, const RopeTable& table);

}  // namespace tessera::nn
