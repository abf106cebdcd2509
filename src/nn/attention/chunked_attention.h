// Causal self-attention of Llama 4, with two kinds of layers.
//
// In most layers, neighbours (x[2i], x[2i + 1]) of queries and keys turn, both are divided by their
// root mean square over a head (no weight), and a query sees only the keys of its own chunk of
// positions (of a document's, where rows are packed). In the other layers nothing turns, a query
// sees all keys before it, and is multiplied by a factor that grows with its position. Turning and
// norm are fp32 inside and round to the activation's dtype. Short symbols: B rows, T (new)
// positions, N all positions so far, G key/value heads, R query heads of each, D head_dim. Next:
// attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/attention/attention.h"
#include "nn/attention/context_attention.h"
#include "nn/linear.h"
#include "nn/rope.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

/// The query at position t is multiplied by 1 + scale * ln(1 + floor((t + 1) / floor)).
struct QueryTemperature {
  double scale = 0.1;
  double floor = 8192.0;
};

/// Heads are those of this rank.
struct ChunkedAttentionOptions {
  std::int64_t hidden_size = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  Bias bias = Bias::kNo;  ///< of q, k, v and o
  /// Query i sees key j where j <= i and both lie in one chunk of so many positions, and both turn;
  /// none: it sees all before, and nothing turns.
  std::optional<std::int64_t> chunk = std::nullopt;
  std::optional<double> qk_norm_eps = std::nullopt;            ///< with a chunk; none: no norm
  std::optional<QueryTemperature> temperature = std::nullopt;  ///< without a chunk
  TensorRegion region = {};
  ContextRegion context = {};
  std::int64_t all_kv_heads = 0;  ///< of all ranks of the region; read where it has several
};

class ChunkedAttention : public TokenMixer {
 public:
  ChunkedAttention(const ChunkedAttentionOptions& options, std::shared_ptr<Rope> rope);
  using TokenMixer::forward;
  at::Tensor forward(const at::Tensor& x, const Documents& documents) override;
  /// The first call of a cache returns forward's bits.
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  using Heads = AttentionHeads;
  /// Projects x at the positions from `begin` on, of `most` or as many as these need.
  Heads project(const at::Tensor& x, std::int64_t begin, std::int64_t most,
                const Documents& documents);
  at::Tensor attend(const Heads& heads, const Documents& documents) const;
  /// The same with whole rows, whose documents begin at `starts` if that is defined.
  at::Tensor attend_rows(const Heads& heads, const at::Tensor& starts) const;
  /// Returns the first key that each position sees, [B, T] on `device`, that of starts; these as
  /// above.
  at::Tensor first_keys(const at::Tensor& starts, std::int64_t rows, std::int64_t positions,
                        at::Device device) const;
  /// Attends for queries [begin, end) of those given, which lie at the same places among the given
  /// keys.
  at::Tensor attend_within(const Heads& heads, std::int64_t begin, std::int64_t end) const;
  /// Where the chunk of a position begins, and the position after it.
  std::int64_t chunk_begin(std::int64_t position) const;
  std::int64_t chunk_end(std::int64_t position, std::int64_t most) const;
  double scale() const;

  ChunkedAttentionOptions options_;
  std::shared_ptr<Rope> rope_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_, o_proj_;
};

}  // namespace tessera::nn
