#include "nn/attention/chunked_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "nn/attention/attention_parts.h"
#include "nn/rms_norm.h"
#include "nn/wide_dtype.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

/// [B, T, H, D] of positions from `begin` on, in their documents -> the same shape and dtype.
at::Tensor warmed(const at::Tensor& q, const QueryTemperature& temperature, std::int64_t begin,
                  const Documents& documents) {
  const WideScope factors;
  const at::ScalarType inside = wide_dtype(q);
  at::Tensor position = documents.are_shared() ? (documents.context->places + 1).to(inside)
                                               : at::arange(begin + 1, begin + q.size(1) + 1,
                                                            q.options().dtype(inside));
  if (documents.are_packed()) {
    position = position - own_places(documents.starts, 1, documents.context.get()).to(inside);
  }
  const at::Tensor factor =
      (position / temperature.floor).floor().log1p() * temperature.scale + 1.0;
  return (q.to(inside) * factor.unsqueeze(-1).unsqueeze(-1)).to(q.scalar_type());
}

/// [B, T, G * R, D] -> [B, G, T, R, D], contiguous.
at::Tensor by_group(const at::Tensor& x, std::int64_t groups) {
  return x.unflatten(2, {groups, -1}).transpose(1, 2).contiguous();
}

}  // namespace

ChunkedAttention::ChunkedAttention(const ChunkedAttentionOptions& options,
                                   std::shared_ptr<Rope> rope)
    : options_(options), rope_(std::move(rope)) {
  std::tie(q_proj_, k_proj_, v_proj_, o_proj_) = add_projections(*this, options, options.bias);
}

double ChunkedAttention::scale() const {
  return 1.0 / std::sqrt(static_cast<double>(options_.head_dim));
}

std::int64_t ChunkedAttention::chunk_begin(std::int64_t position) const {
  return options_.chunk ? position / *options_.chunk * *options_.chunk : 0;
}

std::int64_t ChunkedAttention::chunk_end(std::int64_t position, std::int64_t most) const {
  return options_.chunk ? std::min(most, chunk_begin(position) + *options_.chunk) : most;
}

ChunkedAttention::Heads ChunkedAttention::project(const at::Tensor& x, std::int64_t begin,
                                                  std::int64_t most, const Documents& documents) {
  at::Tensor q = q_proj_->forward(x).unflatten(2, {options_.heads, -1});
  at::Tensor k = k_proj_->forward(x).unflatten(2, {options_.kv_heads, -1});
  if (options_.chunk) {
    // Tables stay in fp32: the published code turns in complex fp32 and rounds once.
    const RopeTable whole = documents.are_shared()
                                ? rope_->table(documents.positions(x), wide_dtype(x), x.device())
                                : turns_from(*rope_, begin, most, x, wide_dtype(x));
    const RopeTable turns = table_of(documents, whole);
    const auto finished = [&](const at::Tensor& heads) {
      const at::Tensor turned = rotate_interleaved(heads, turns);
      return options_.qk_norm_eps ? plain_rms_norm(turned, *options_.qk_norm_eps) : turned;
    };
    q = finished(q);
    k = finished(k);
  } else if (options_.temperature) {
    q = warmed(q, *options_.temperature, begin, documents);
  }
  return {by_group(q, options_.kv_heads), by_group(k, options_.kv_heads), v_proj_->forward(x)};
}

at::Tensor ChunkedAttention::attend_within(const Heads& heads, std::int64_t begin,
                                           std::int64_t end) const {
  const std::int64_t count = end - begin;
  if (count == heads.q.size(2)) return causal_attention(heads.q, heads.k, heads.v, scale());
  return causal_attention(heads.q.narrow(2, begin, count).contiguous(),
                          heads.k.narrow(2, begin, count).contiguous(),
                          heads.v.narrow(1, begin, count).contiguous(), scale());
}

at::Tensor ChunkedAttention::first_keys(const at::Tensor& starts, std::int64_t rows,
                                        std::int64_t positions, at::Device device) const {
  if (!options_.chunk) return starts;
  const at::Tensor begins =
      starts.defined() ? starts
                       : at::zeros({rows, positions}, at::TensorOptions(at::kLong).device(device));
  const at::Tensor own = at::arange(positions, begins.options()) - begins;
  return begins + own.div(*options_.chunk, "floor") * *options_.chunk;
}

at::Tensor ChunkedAttention::attend(const Heads& heads, const Documents& documents) const {
  if (documents.context == nullptr) return attend_rows(heads, documents.starts);
  const ContextRows& rows = *documents.context;
  if (options_.context.form == ContextForm::kHeads) {
    return over_heads(heads, options_.context, rows,
                      [&](const Heads& all) { return attend_rows(all, documents.starts); });
  }
  const AttentionMask mask{.begins = first_keys(documents.starts, heads.q.size(0),
                                                rows.cut.positions, heads.q.device())};
  return context_attention(heads, scale(), mask, Scores::kOfInputs, options_.context, documents);
}

at::Tensor ChunkedAttention::attend_rows(const Heads& heads, const at::Tensor& starts) const {
  const std::int64_t positions = heads.q.size(2);
  if (starts.defined()) {
    return causal_attention(
        heads.q, heads.k, heads.v, scale(),
        {.begins = first_keys(starts, heads.q.size(0), positions, heads.q.device())});
  }
  if (positions == 0) return attend_within(heads, 0, 0);
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < positions;) {
    const std::int64_t end = chunk_end(begin, positions);
    parts.push_back(attend_within(heads, begin, end));
    begin = end;
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, 1);
}

at::Tensor ChunkedAttention::forward(const at::Tensor& x, const Documents& documents) {
  const auto mixed = [this, context = documents.context](const std::vector<at::Tensor>& in) {
    const Documents of_rows{in[1], context};
    return attend(project(in[0], 0, 0, of_rows), of_rows);
  };
  return project_out(*o_proj_, options_.region, *this, {options_.region.enter(x), documents.starts},
                     mixed, documents.are_shared());
}

at::Tensor ChunkedAttention::decode(const at::Tensor& x, KvCache& cache) {
  const at::NoGradGuard no_grad;
  const std::int64_t before = cache.length();
  const std::int64_t after = before + x.size(1);
  const Heads heads = project(x, before, cache.capacity(), {});
  cache.append(heads.k, heads.v);
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = before; begin < after;) {
    const std::int64_t end = chunk_end(begin, after);
    const std::int64_t first = chunk_begin(begin);
    if (begin == first) {
      parts.push_back(attend_within(heads, begin - before, end - before));
    } else {
      parts.push_back(cached_attention(heads.q.narrow(2, begin - before, end - begin),
                                       cache.keys().narrow(2, first, end - first),
                                       cache.values().narrow(2, first, end - first), scale()));
    }
    begin = end;
  }
  return o_proj_->forward(parts.size() == 1 ? parts.front() : at::cat(parts, 1));
}

}  // namespace tessera::nn
