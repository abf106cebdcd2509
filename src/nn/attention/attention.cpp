#include "nn/attention/attention.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "kernels/seen_blocks.h"
#include "nn/attention/attention_parts.h"
#include "nn/attention/context_attention.h"
#include "tessera/error.h"

namespace tessera::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CausalAttentionFunction : torch::autograd::Function<CausalAttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
    auto [result, kept] = kernels::causal_attention_forward(q, k, v, begins, ends, window, scale);
    ctx->set_materialize_grads(false);
    kept.push_back(begins.value_or(at::Tensor()));
    kept.push_back(ends.value_or(at::Tensor()));
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["groups"] = q.size(1);
    ctx->saved_data["repeat"] = q.size(3);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(7);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const std::size_t kept = saved.size() - 2;
    auto [grad_q, grad_k, grad_v] = kernels::causal_attention_backward(
        grads[0], at::TensorList(saved).slice(0, kept), given(saved[kept]), given(saved[kept + 1]),
        ctx->saved_data["window"].toInt(), ctx->saved_data["groups"].toInt(),
        ctx->saved_data["repeat"].toInt(), ctx->saved_data["scale"].toDouble());
    const at::Tensor none;
    return {grad_q, grad_k, grad_v, none, none, none, none};
  }
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale, const AttentionMask& mask) {
  TESSERA_INVARIANT(!mask.sinks.defined(), "sinks in attention that has none");
  const std::optional<at::Tensor> begins = given(mask.begins), ends = given(mask.ends);
  const std::int64_t window = mask.window.value_or(kernels::kNoWindow);
  // Without a gradient nothing is kept: that is decided here, a Function's forward cannot see it.
  if (!c10::GradMode::is_enabled() || base::has_second_derivatives(q)) {
    return kernels::causal_attention(q, k, v, begins, ends, window, scale);
  }
  return CausalAttentionFunction::apply(q, k, v, begins, ends, window, scale);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  return kernels::cached_attention(q, keys, values, scale);
}

Attention::Attention(const AttentionOptions& options, std::shared_ptr<Rope> rope)
    : options_(options), rope_(std::move(rope)) {
  if (options.projections == AttentionOptions::Projections::kFused) {
    TESSERA_INVARIANT(options.gate == AttentionOptions::Gate::kNo,
                      "a gate of attention whose projections are one matrix");
    add_fused_projections();
  } else {
    std::tie(q_proj_, k_proj_, v_proj_, o_proj_) =
        add_projections(*this, options, options.output_bias.value_or(options.bias),
                        options.gate == AttentionOptions::Gate::kYes ? 2 : 1);
  }
  add_norms();
  if (options.sinks == AttentionOptions::Sinks::kYes) {
    sinks_ = add_parameter("sinks", {options.heads},
                           bias_of_layer(options.region.column(), InitKind::kNormal));
  }
}

void Attention::add_fused_projections() {
  const TensorRegion& region = options_.region;
  const std::int64_t q_size = options_.heads * options_.head_dim;
  const std::int64_t kv_size = options_.kv_heads * options_.head_dim;
  const std::int64_t ranks = region.size();
  qkv_proj_ = register_module(
      "qkv_proj", std::make_shared<Linear>(
                      options_.hidden_size, q_size + 2 * kv_size, options_.bias,
                      side_by_side(region, {ranks * q_size, ranks * kv_size, ranks * kv_size})));
  o_proj_ = register_module(
      "o_proj",
      std::make_shared<Linear>(q_size, options_.hidden_size,
                               options_.output_bias.value_or(options_.bias), row_parallel(region)));
}

void Attention::add_norms() {
  using QkNorm = AttentionOptions::QkNorm;
  if (options_.qk_norm == QkNorm::kNo) return;
  const TensorRegion& region = options_.region;
  const bool of_all = options_.qk_norm == QkNorm::kAllHeads;
  const auto norm = [&](const char* name, std::int64_t heads, ParameterLayout of_columns) {
    return register_module(
        name, std::make_shared<RmsNorm>(of_all ? heads * options_.head_dim : options_.head_dim,
                                        options_.norm_eps, options_.norm_rounding,
                                        of_all ? std::move(of_columns) : region.inside(),
                                        options_.norm_factor));
  };
  q_norm_ = norm("q_norm", options_.heads, region.column());
  k_norm_ = norm("k_norm", options_.kv_heads, region.heads(options_.all_kv_heads));
}

double Attention::scale() const {
  return options_.scale.value_or(1.0 / std::sqrt(static_cast<double>(options_.head_dim)));
}

Attention::Products Attention::products(const at::Tensor& x) const {
  if (!qkv_proj_) {
    Products of_x{q_proj_->forward(x), k_proj_->forward(x), v_proj_->forward(x), {}};
    if (options_.gate == AttentionOptions::Gate::kNo) return of_x;
    const auto both = of_x.q.unflatten(2, {options_.heads, 2, options_.head_dim}).unbind(3);
    return {both[0].flatten(2), of_x.k, of_x.v, both[1].flatten(2)};
  }
  const std::int64_t kv_size = options_.kv_heads * options_.head_dim;
  const auto parts = qkv_proj_->forward(x).split_with_sizes(
      {options_.heads * options_.head_dim, kv_size, kv_size}, -1);
  return {parts[0], parts[1], parts[2].contiguous(), {}};
}

Attention::Heads Attention::project(const at::Tensor& x, const RopeTable& table) {
  const bool of_all = options_.qk_norm == AttentionOptions::QkNorm::kAllHeads;
  const auto paired = [&](const at::Tensor& tensor, std::int64_t heads) {
    return options_.turned ? pairs_of_part(tensor, heads, *options_.turned) : tensor;
  };
  const auto heads_of = [&](at::Tensor heads, const std::shared_ptr<RmsNorm>& norm,
                            const HeadLayout& layout) {
    if (of_all) heads = norm->forward_shared(heads, options_.region.axis());
    const bool of_each = norm && !of_all;
    return rope_heads(
        paired(heads, layout.heads), layout,
        of_each ? HeadNorm{paired(norm->factor(), 1), norm->eps(), norm->rounding()} : HeadNorm{},
        table);
  };
  const HeadLayout queries{.heads = options_.heads, .repeat = options_.heads / options_.kv_heads};
  const HeadLayout keys{.heads = options_.kv_heads};
  auto [query, key, value, gate] = products(x);
  at::Tensor q = heads_of(std::move(query), q_norm_, queries);
  at::Tensor k = heads_of(std::move(key), k_norm_, keys);
  return {std::move(q), std::move(k), std::move(value), std::move(gate)};
}

bool Attention::is_plain(std::int64_t positions) const {
  return !sinks_.defined() && (!options_.window || positions <= *options_.window);
}

at::Tensor Attention::forward(const at::Tensor& x, const Documents& documents) {
  using Tensors = std::vector<at::Tensor>;
  const auto mixed = [this, context = documents.context](const Tensors& in) {
    const at::Tensor& all = in[0];
    const Documents of_rows{in[1], context};
    const Heads heads = project(all, table_of(of_rows, *rope_, all));
    return gated(attend(heads, of_rows), heads);
  };
  const Tensors entered{options_.region.enter(x), documents.starts};
  const bool norms_over_ranks =
      options_.qk_norm == AttentionOptions::QkNorm::kAllHeads && options_.region.size() > 1;
  return project_out(*o_proj_, options_.region, *this, entered, mixed,
                     norms_over_ranks || documents.are_shared());
}

at::Tensor Attention::attend(const Heads& heads, const Documents& documents) const {
  const std::int64_t positions =
      documents.are_shared() ? documents.context->cut.positions : heads.q.size(2);
  if (is_plain(positions)) {
    return context_attention({heads.q, heads.k, heads.v}, scale(), {.begins = documents.starts},
                             Scores::kOfInputs, options_.context, documents);
  }
  return context_attention({heads.q, heads.k, heads.v}, scale(),
                           {options_.window, sinks_, documents.starts}, Scores::kWide,
                           options_.context, documents);
}

at::Tensor Attention::gated(const at::Tensor& attended, const Heads& heads) {
  return heads.gate.defined() ? attended * heads.gate.sigmoid() : attended;
}

at::Tensor Attention::decode(const at::Tensor& x, KvCache& cache) {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = cache.length();
  const Heads heads = project(x, turns_from(*rope_, begin, cache.capacity(), x, x.scalar_type()));
  cache.append(heads.k, heads.v);
  if (begin == 0) return o_proj_->forward(gated(attend(heads, {}), heads));
  const at::Tensor attended = is_plain(cache.length())
                                  ? cached_attention(heads.q, cache.keys(), cache.values(), scale())
                                  : windowed_attention(heads.q, cache.keys(), cache.values(),
                                                       {options_.window, sinks_}, scale());
  return o_proj_->forward(gated(attended, heads));
}

}  // namespace tessera::nn
