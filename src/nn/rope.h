// Rotary position embedding over pairs (x[i], x[i + D/2]), or over neighbours (x[2i], x[2i + 1]),
// with the `linear`, `llama3`, `yarn` and `longrope` scaling of frequencies and the `proportional`
// kind that turns only the first pairs; and in two dimensions for images.
//
// Frequencies and tables are fp32; only the finished cos and sin are rounded to the activation's
// dtype. The q/k norm of Qwen3 is taken along: both work on one head of one position. In two
// dimensions (Axial) the first half of a head turns with x, the second with y, each in pairs (a[j],
// a[j + D/4]) with the frequencies of a head of D/2; positions come with the input, one (x, y) a
// patch. Short symbols: B rows, T positions, N images, P patches, H heads, D head_dim. Next:
// attention/attention.h, attention/masked_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

#include "nn/rms_norm.h"
#include "nn/rope_options.h"

namespace tessera::nn {

/// fp32 [D/2], of a row of `positions`, which longrope alone asks for.
at::Tensor inverse_frequencies(const RopeOptions& options, std::int64_t head_dim,
                               std::int64_t positions = 0);

/// cos and sin [T, D/2] of positions 0..T-1, or [B, T, D/2] of each row's own (documents.h).
struct RopeTable {
  at::Tensor cos;
  at::Tensor sin;
};

/// The tables of one model, kept per dtype for the longest sequence seen. No parameter, no buffer.
/// Threads: one at a time.
class Rope {
 public:
  /// For a head, or a part of one, with so many elements that turn.
  Rope(const RopeOptions& options, std::int64_t head_dim);
  RopeTable table(std::int64_t positions, at::ScalarType dtype, at::Device device) {
    return table(positions, positions, dtype, device);
  }
  /// The same of the first `positions` of a row of `length`, or of a text that has come so far.
  RopeTable table(std::int64_t positions, std::int64_t length, at::ScalarType dtype,
                  at::Device device);
  /// The table of the longest row that is short (longest_short_row), followed by that of
  /// `positions` of longer rows.
  RopeTable short_and_long_table(std::int64_t positions, at::ScalarType dtype, at::Device device);
  const RopeOptions& options() const { return options_; }

 private:
  using ByPlace = std::map<std::pair<at::ScalarType, std::int64_t>, RopeTable>;
  struct Tables {
    at::Tensor frequencies;  // made with the first one: a model that is only described needs none
    ByPlace by_place;
  };
  RopeOptions options_;
  std::int64_t head_dim_;
  Tables short_, long_;  // the second where rows differ (longest_short_row)
  ByPlace both_;         // of short_and_long_table
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

/// For a rope that turns the first `turned` elements of a head, R, in pairs (x[i], x[i + R/2]): x
/// [..., H*D] in the order in which rope_heads pairs (a[i], a[i + D/2]) those, and the rest with
/// angle 0. Queries and keys in the same order have the same products; a norm's weight goes along
/// (H = 1).
at::Tensor pairs_of_part(const at::Tensor& x, std::int64_t heads, std::int64_t turned);

/// Neighbours (x[2i], x[2i + 1]) turned, in place and order: x [B, T, H, D] with a table in fp32
/// (fp64 for fp64) -> the same shape, rounded once to x's dtype. Out of ATen operations.
at::Tensor rotate_interleaved(const at::Tensor& x, const RopeTable& table);

/// cos and sin [N, P, 2, D/4] of (x, y), computed in fp32, then cast.
struct AxialTable {
  at::Tensor cos;
  at::Tensor sin;
};

/// positions [N, P, 2] i64.
AxialTable axial_table(const at::Tensor& positions, std::int64_t head_dim, double theta,
                       at::ScalarType dtype);

/// x [N, P, H*D] -> norm of each head if asked, then turned: [N, H/R, P, R, D], as rope_heads gives
/// it.
at::Tensor axial_rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                            const AxialTable& table);

}  // namespace tessera::nn
