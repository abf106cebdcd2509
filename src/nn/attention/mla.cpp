#include "nn/attention/mla.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

#include "base/random.h"
#include "nn/attention/attention.h"
#include "nn/attention/attention_parts.h"
#include "nn/attention/context_attention.h"
#include "nn/wide_dtype.h"

namespace tessera::nn {
namespace {

/// Fixed in the published models' code, not their rms_norm_eps.
constexpr double kLatentEps = 1e-6;

/// Two of [B, T, H, ...] side by side -> [B, H, T, sum], written as attention reads it.
at::Tensor by_head(const at::Tensor& first, const at::Tensor& second) {
  return at::cat({first.transpose(1, 2), second.transpose(1, 2)}, 3);
}

}  // namespace

Mla::Mla(const MlaOptions& options, std::shared_ptr<Rope> rope)
    : options_(options), rope_(std::move(rope)) {
  const std::int64_t qk_head_dim = options.qk_nope_head_dim + options.qk_rope_head_dim;
  const TensorRegion& region = options.region;
  // Latents are whole on every rank, what is made of them is a part of the heads.
  const auto latent = [&](const char* name, std::int64_t width) {
    return register_module(
        name, std::make_shared<Linear>(options.hidden_size, width, options.bias, inside(region)));
  };
  const auto heads = [&](const char* name, std::int64_t in, std::int64_t head_dim) {
    return register_module(name, std::make_shared<Linear>(in, options.heads * head_dim, Bias::kNo,
                                                          column_parallel(region)));
  };
  const auto norm = [&](const char* name, std::int64_t size) {
    return register_module(
        name,
        std::make_shared<RmsNorm>(size, kLatentEps, NormRounding::kBeforeWeight, region.inside()));
  };
  if (options.q_lora_rank) {
    const std::int64_t rank = *options.q_lora_rank;
    q_a_proj_ = latent("q_a_proj", rank);
    q_a_layernorm_ = norm("q_a_layernorm", rank);
    q_b_proj_ = heads("q_b_proj", rank, qk_head_dim);
  } else {
    q_proj_ = heads("q_proj", options.hidden_size, qk_head_dim);
  }
  kv_a_proj_with_mqa_ =
      latent("kv_a_proj_with_mqa", options.kv_lora_rank + options.qk_rope_head_dim);
  kv_a_layernorm_ = norm("kv_a_layernorm", options.kv_lora_rank);
  kv_b_proj_ =
      heads("kv_b_proj", options.kv_lora_rank, options.qk_nope_head_dim + options.v_head_dim);
  o_proj_ = register_module(
      "o_proj", std::make_shared<Linear>(options.heads * options.v_head_dim, options.hidden_size,
                                         options.bias, row_parallel(region)));
}

/// [B, H, T, nope + rope].
at::Tensor Mla::queries(const at::Tensor& x, const RopeTable& table) {
  const at::Tensor flat = q_proj_
                              ? q_proj_->forward(x)
                              : q_b_proj_->forward(q_a_layernorm_->forward(q_a_proj_->forward(x)));
  const at::Tensor q = flat.unflatten(2, {options_.heads, -1});
  const at::Tensor turned =
      rotate_interleaved(q.narrow(3, options_.qk_nope_head_dim, options_.qk_rope_head_dim), table);
  return by_head(q.narrow(3, 0, options_.qk_nope_head_dim), turned);
}

at::Tensor Mla::forward(const at::Tensor& stream, const Documents& documents) {
  const auto mixed = [this, context = documents.context](const std::vector<at::Tensor>& in) {
    const at::Tensor& x = in[0];
    const Documents of_rows{in[1], context};
    const RopeTable whole = of_rows.are_shared()
                                ? rope_->table(of_rows.positions(x), wide_dtype(x), x.device())
                                : turns_of(x, 0, 0);
    const RopeTable turns = table_of(of_rows, whole);
    return attend(queries(x, turns), latents_of(x, turns), of_rows);
  };
  return project_out(*o_proj_, options_.region, *this,
                     {options_.region.enter(stream), documents.starts}, mixed,
                     documents.are_shared());
}

RopeTable Mla::turns_of(const at::Tensor& x, std::int64_t begin, std::int64_t most) {
  return turns_from(*rope_, begin, most, x, wide_dtype(x));
}

Mla::Latents Mla::latents_of(const at::Tensor& x, const RopeTable& table) {
  const at::Tensor both = kv_a_proj_with_mqa_->forward(x);
  const at::Tensor latent = kv_a_layernorm_->forward(both.narrow(2, 0, options_.kv_lora_rank));
  return {latent, rotate_interleaved(
                      both.narrow(2, options_.kv_lora_rank, options_.qk_rope_head_dim).unsqueeze(2),
                      table)};
}

at::Tensor Mla::attend(const at::Tensor& q, const Latents& own, const Documents& documents) {
  // The latents are gathered, which are short; their heads are made on every rank.
  const bool gathers = documents.are_shared() && options_.context.form == ContextForm::kGather;
  const Latents latents = gathers ? gathered(own, documents) : own;
  // Dropout of an adapter sees whole rows then.
  std::optional<SampleScope> of_whole_rows;
  if (auto place = sample_place(); gathers && place) {
    place->places = nullptr;
    of_whole_rows.emplace(std::move(place));
  }
  const at::Tensor kv = kv_b_proj_->forward(latents.values).unflatten(2, {options_.heads, -1});
  const at::Tensor k = by_head(kv.narrow(3, 0, options_.qk_nope_head_dim),
                               latents.turned.expand({-1, -1, options_.heads, -1}));
  const at::Tensor v = kv.narrow(3, options_.qk_nope_head_dim, options_.v_head_dim).flatten(2, 3);
  // Every head has a key of its own: H groups of one query head each.
  const AttentionHeads heads{q.unsqueeze(3), k.unsqueeze(3), v};
  const AttentionMask mask{.begins = documents.starts};
  if (gathers) return attention_to_whole(heads, options_.scale, mask, options_.context, documents);
  return context_attention(heads, options_.scale, mask, Scores::kOfInputs, options_.context,
                           documents);
}

/// Returns the latents of all positions of the rows that own queries see.
Mla::Latents Mla::gathered(const Latents& own, const Documents& documents) const {
  const at::Tensor both = at::cat({own.values, own.turned.squeeze(2)}, 2);
  const at::Tensor whole =
      whole_of_context(both, {.begins = documents.starts}, options_.context, documents);
  return {whole.narrow(2, 0, options_.kv_lora_rank),
          whole.narrow(2, options_.kv_lora_rank, options_.qk_rope_head_dim).unsqueeze(2)};
}

/// q [B, H, T, nope + rope] of the last T positions of the cache -> [B, T, H * v].
at::Tensor Mla::attend_cached(const at::Tensor& q, const KvCache& cache) const {
  const std::int64_t nope = options_.qk_nope_head_dim;
  const at::Tensor heads =
      kv_b_proj_->whole_weight(q.scalar_type()).view({options_.heads, -1, options_.kv_lora_rank});
  const at::Tensor of_latent = at::matmul(q.narrow(3, 0, nope), heads.narrow(1, 0, nope));
  const at::Tensor turned = q.narrow(3, nope, options_.qk_rope_head_dim);
  // One key head that all query heads share: [B, 1, T, H, L + rope].
  const at::Tensor shared = at::cat({of_latent, turned}, 3).transpose(1, 2).unsqueeze(1);
  const at::Tensor keys = cache.keys();
  const at::Tensor mixed = cached_attention(shared, keys, keys.narrow(3, 0, options_.kv_lora_rank),
                                            options_.scale);  // [B, T, H * L]
  const at::Tensor by_heads = mixed.unflatten(2, {options_.heads, -1}).transpose(1, 2);
  const at::Tensor values =
      at::matmul(by_heads, heads.narrow(1, nope, options_.v_head_dim).transpose(1, 2));
  return values.transpose(1, 2).flatten(2, 3);
}

at::Tensor Mla::decode(const at::Tensor& x, KvCache& cache) {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = cache.length();
  const RopeTable turns = turns_of(x, begin, cache.capacity());
  const at::Tensor q = queries(x, turns);
  const Latents added = latents_of(x, turns);
  const at::Tensor keys = at::cat({added.values, added.turned.squeeze(2)}, 2);  // [B, T, L + rope]
  cache.append(keys.unsqueeze(1).unsqueeze(3), {});
  return o_proj_->forward(begin == 0 ? attend(q, added, {}) : attend_cached(q, cache));
}

}  // namespace tessera::nn
