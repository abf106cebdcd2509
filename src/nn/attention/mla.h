// Multi-head latent attention (DeepSeek V2 and V3): keys and values of all heads are made from one
// short latent, and one rotated key part is shared by all of them.
//
// The part of a head that rope turns pairs neighbours (x[2i], x[2i + 1]); values are narrower than
// queries and keys. In training the latent is widened to whole keys and values, and attention is
// the causal one of attention.h. A decoded token never widens them: what a head's key is made by
// goes to its query instead, what its value is made by to its result, so that all heads meet one
// key, latent and rotated part, and the cache holds nothing else (section 2.1.2 of DeepSeek-V2,
// arXiv 2405.04434). Short symbols: B rows, T positions, N all positions so far, H heads of this
// rank, L width of the latent. Next: attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/attention/attention.h"
#include "nn/context_region.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

struct MlaOptions {
  std::int64_t hidden_size = 0;
  std::int64_t heads = 0;  ///< of this rank; the latents are whole on every rank
  /// Queries are made from a latent of this width; none = from x.
  std::optional<std::int64_t> q_lora_rank = std::nullopt;
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;  ///< of a query's or key's head the part that is not turned
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  Bias bias = Bias::kNo;  ///< of q_a_proj, kv_a_proj_with_mqa and o_proj
  double scale = 1.0;     ///< of the scores
  TensorRegion region = {};
  ContextRegion context = {};
};

class Mla : public TokenMixer {
 public:
  /// `rope` turns qk_rope_head_dim elements.
  Mla(const MlaOptions& options, std::shared_ptr<Rope> rope);
  using TokenMixer::forward;
  at::Tensor forward(const at::Tensor& stream, const Documents& documents) override;
  /// The first call of a cache returns forward's bits.
  at::Tensor decode(const at::Tensor& x, KvCache& cache) override;

 private:
  struct Latents {
    at::Tensor values;  ///< [B, T, L], the latent of keys and values
    at::Tensor turned;  ///< [B, T, 1, rope], the key part of all heads
  };
  /// As turns_from. Tables stay in fp32: the published code turns in complex fp32 and rounds once.
  RopeTable turns_of(const at::Tensor& x, std::int64_t begin, std::int64_t most);
  at::Tensor queries(const at::Tensor& x, const RopeTable& table);
  Latents latents_of(const at::Tensor& x, const RopeTable& table);
  at::Tensor attend(const at::Tensor& q, const Latents& own, const Documents& documents);
  Latents gathered(const Latents& own, const Documents& documents) const;
  at::Tensor attend_cached(const at::Tensor& q, const KvCache& cache) const;

  MlaOptions options_;
  std::shared_ptr<Rope> rope_;
  std::shared_ptr<Linear> q_proj_;               ///< null with a latent of queries
  std::shared_ptr<Linear> q_a_proj_, q_b_proj_;  ///< null without, as the norm
  std::shared_ptr<RmsNorm> q_a_layernorm_;
  std::shared_ptr<Linear> kv_a_proj_with_mqa_, kv_b_proj_, o_proj_;
  std::shared_ptr<RmsNorm> kv_a_layernorm_;
};

}  // namespace tessera::nn
