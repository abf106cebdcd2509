// The layer of layer_step as a program written by hand: the library's kernels and plain products in
// the order of the layer's own forward and backward, every result in memory that is there already,
// weight gradients in slots. A replay is measured against it; its numbers are compared with the
// layer's once.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/results.h"
#include "kernels/seen_blocks.h"
#include "nn/rope.h"

namespace tessera::bench {

struct LayerSizes {
  std::int64_t tokens, hidden, heads, kv_heads, head_dim, inner;
  double eps;
};

class LayerProgram {
 public:
  /// `parameters` as DecoderLayer names them.
  LayerProgram(const LayerSizes& sizes, const std::map<std::string, at::Tensor>& parameters,
               const nn::RopeTable& table)
      : sizes_(sizes), weights_(parameters), table_(table) {
    for (const auto& [name, weight] : weights_) slots_[name] = at::empty_like(weight);
    const auto [tokens, hidden, heads, kv_heads, head_dim, inner, eps] = sizes;
    const auto make = [&](std::int64_t columns) { return at::empty({tokens, columns}); };
    const std::int64_t q = heads * head_dim, kv = kv_heads * head_dim;
    for (auto* one : {&normed_, &normed_again_, &out_, &sum_, &added_, &grad_normed_, &more_,
                      &grad_sum_, &grad_x_, &down_, &grad_x1_}) {
      *one = make(hidden);
    }
    for (auto* one : {&q_, &grad_attended_, &grad_q_, &attended_}) *one = make(q);
    for (auto* one : {&k_, &v_, &grad_k_}) *one = make(kv);
    for (auto* one : {&gate_, &up_, &inner_, &grad_inner_, &grad_gate_, &grad_up_}) {
      *one = make(inner);
    }
    scale_ = at::empty({1, tokens});
    scale_again_ = at::empty({1, tokens});
    const std::int64_t repeat = heads / kv_heads;
    q_heads_ = at::empty({1, kv_heads, tokens, repeat, head_dim});
    k_heads_ = at::empty({1, kv_heads, tokens, 1, head_dim});
    q_scale_ = at::empty({tokens, heads});
    k_scale_ = at::empty({tokens, kv_heads});
    values_ = at::empty({kv_heads, tokens, head_dim});
    sums_ = at::empty({tokens * heads, 2});
    grad_q_heads_ = at::empty_like(q_heads_);
    grad_k_heads_ = at::empty_like(k_heads_);
    grad_v_ = at::empty({1, tokens, kv});
  }

  /// x and grad [1, T, hidden] -> the result and x's gradient.
  std::pair<at::Tensor, at::Tensor> step(const at::Tensor& x, const at::Tensor& grad) {
    const at::NoGradGuard no_grad;
    forward(x);
    backward(x, grad);
    return {added_.view(x.sizes()), grad_x_.view(x.sizes())};
  }
  const std::map<std::string, at::Tensor>& slots() const { return slots_; }

 private:
  const at::Tensor& weight(const char* name) const { return weights_.at(name); }

  static void product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    at::mm_out(out, a, b);
  }
  at::Tensor wide(const at::Tensor& rows) const { return rows.view({1, sizes_.tokens, -1}); }
  static at::Tensor flat(const at::Tensor& x) { return x.view({-1, x.size(-1)}); }

  template <class Call>
  static auto into(const std::vector<at::Tensor>& places, const Call& call) {
    const kernels::ResultsScope scope(places);
    return call();
  }

  void forward(const at::Tensor& x) {
    into({wide(normed_), scale_},
         [&] { return kernels::rms_norm(x, weight("input_layernorm.weight"), sizes_.eps, true); });
    product(q_, normed_, weight("self_attn.q_proj.weight").t());
    product(k_, normed_, weight("self_attn.k_proj.weight").t());
    product(v_, normed_, weight("self_attn.v_proj.weight").t());
    into({q_heads_, q_scale_}, [&] {
      return kernels::rope_heads(wide(q_), weight("self_attn.q_norm.weight"), table_.cos,
                                 table_.sin, sizes_.heads, sizes_.heads / sizes_.kv_heads,
                                 sizes_.eps, true);
    });
    into({k_heads_, k_scale_}, [&] {
      return kernels::rope_heads(wide(k_), weight("self_attn.k_norm.weight"), table_.cos,
                                 table_.sin, sizes_.kv_heads, 1, sizes_.eps, true);
    });
    std::tie(attention_, kept_) = into({wide(attended_), values_, sums_}, [&] {
      return kernels::causal_attention_forward(q_heads_, k_heads_, wide(v_), {}, {},
                                               kernels::kNoWindow, score_scale());
    });
    product(out_, flat(attention_), weight("self_attn.o_proj.weight").t());
    into({wide(sum_), wide(normed_again_), scale_again_}, [&] {
      return kernels::add_rms_norm(x, wide(out_), weight("post_attention_layernorm.weight"),
                                   sizes_.eps, true);
    });
    product(gate_, normed_again_, weight("mlp.gate_proj.weight").t());
    product(up_, normed_again_, weight("mlp.up_proj.weight").t());
    into({inner_}, [&] { return kernels::swiglu(gate_, up_); });
    product(down_, inner_, weight("mlp.down_proj.weight").t());
    at::add_out(added_, sum_, down_);
  }

  /// Of one linear layer: its weight's gradient, and that of its input into `to`.
  void linear_backward(const char* name, const at::Tensor& grad, const at::Tensor& x,
                       at::Tensor& to) {
    product(slots_.at(name), grad.t(), x);
    product(to, grad, weight(name));
  }

  void backward(const at::Tensor& x, const at::Tensor& result_grad) {
    const at::Tensor grad = flat(result_grad);
    linear_backward("mlp.down_proj.weight", grad, inner_, grad_inner_);
    into({grad_gate_, grad_up_}, [&] { return kernels::swiglu_backward(grad_inner_, gate_, up_); });
    linear_backward("mlp.up_proj.weight", grad_up_, normed_again_, grad_normed_);
    linear_backward("mlp.gate_proj.weight", grad_gate_, normed_again_, more_);
    grad_normed_.add_(more_);
    const auto of_norm = into({wide(grad_sum_)}, [&] {
      return kernels::rms_norm_backward(wide(grad_normed_), result_grad, wide(sum_),
                                        weight("post_attention_layernorm.weight"), scale_again_,
                                        true, true);
    });
    slots_.at("post_attention_layernorm.weight").copy_(std::get<1>(of_norm));
    linear_backward("self_attn.o_proj.weight", grad_sum_, flat(attention_), grad_attended_);
    const auto [grad_q, grad_k, grad_v] = into({grad_q_heads_, grad_k_heads_, grad_v_}, [&] {
      return kernels::causal_attention_backward(wide(grad_attended_), kept_, {}, {},
                                                kernels::kNoWindow, sizes_.kv_heads,
                                                sizes_.heads / sizes_.kv_heads, score_scale());
    });
    heads_backward("self_attn.q_norm.weight", grad_q, q_, q_scale_, grad_q_);
    heads_backward("self_attn.k_norm.weight", grad_k, k_, k_scale_, grad_k_);
    linear_backward("self_attn.v_proj.weight", flat(grad_v), normed_, grad_normed_);
    linear_backward("self_attn.k_proj.weight", grad_k_, normed_, more_);
    grad_normed_.add_(more_);
    linear_backward("self_attn.q_proj.weight", grad_q_, normed_, more_);
    grad_normed_.add_(more_);
    const auto of_first = into({wide(grad_x1_)}, [&] {
      return kernels::rms_norm_backward(wide(grad_normed_), std::nullopt, x,
                                        weight("input_layernorm.weight"), scale_, true, true);
    });
    slots_.at("input_layernorm.weight").copy_(std::get<1>(of_first));
    at::add_out(grad_x_, grad_sum_, grad_x1_);
  }

  void heads_backward(const char* name, const at::Tensor& grad, const at::Tensor& x,
                      const at::Tensor& scale, const at::Tensor& to) {
    const auto both = into({wide(to)}, [&] {
      return kernels::rope_heads_backward(grad, wide(x), weight(name), table_.cos, table_.sin,
                                          scale, true, true);
    });
    slots_.at(name).copy_(std::get<1>(both));
  }

  double score_scale() const { return 1.0 / std::sqrt(static_cast<double>(sizes_.head_dim)); }

  LayerSizes sizes_;
  std::map<std::string, at::Tensor> weights_, slots_;
  nn::RopeTable table_;
  at::Tensor attention_;  // attended_
  std::vector<at::Tensor> kept_;
  at::Tensor normed_, normed_again_, out_, sum_, added_, down_, q_, k_, v_, attended_, gate_, up_,
      inner_, scale_, scale_again_, q_heads_, k_heads_, q_scale_, k_scale_, values_, sums_;
  at::Tensor grad_normed_, more_, grad_sum_, grad_x_, grad_x1_, grad_attended_, grad_q_, grad_k_,
      grad_v_, grad_inner_, grad_gate_, grad_up_, grad_q_heads_, grad_k_heads_;
};

}  // namespace tessera::bench
