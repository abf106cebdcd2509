// Operations that are one kernel on a GPU. libtorch decomposes some of them elsewhere; they get the
// boxed kernel under their own names, which calls the CPU's implementation. Some have no kernel for
// CPUs at all: here is one, made of ATen's operations. It is registered for CPUs, so that a run on
// the CPU that takes a device's choice of kernels calls the very same function.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/promote_types.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "sim/fallback.h"
#include "sim/operations.h"

namespace tessera::sim {
namespace {

/// y = x * rstd * weight over the last dim; formed in fp32 (fp64 of fp64) and rounded once.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     at::IntArrayRef shape, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> wanted) {
  TORCH_CHECK(shape.size() == 1 && shape[0] == x.size(-1), "sim: norms over the last dim alone");
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  const bool has_weight = weight && weight->defined();
  const at::Tensor wide = x.to(inside), wide_grad = grad.to(inside), scale = rstd.to(inside);
  const at::Tensor normed = wide * scale;
  at::Tensor grad_x, grad_weight;
  if (wanted[0]) {
    const at::Tensor of_normed = has_weight ? wide_grad * weight->to(inside) : wide_grad;
    const at::Tensor mean = (of_normed * normed).mean(-1, /*keepdim=*/true);
    grad_x = ((of_normed - normed * mean) * scale).to(x.scalar_type());
  }
  if (wanted[1] && has_weight) {
    grad_weight = (wide_grad * normed).reshape({-1, shape[0]}).sum(0).to(weight->scalar_type());
  }
  return {grad_x, grad_weight};
}

// Flash attention: q [B, H, T, D], k and v [B, G, T, D] with G keys for H queries.

void check_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout) {
  const bool narrow = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  TORCH_CHECK(narrow, "sim: flash attention takes bfloat16 and float16, found ", q.scalar_type());
  TORCH_CHECK(q.size(3) % 8 == 0 && q.size(3) <= 256,
              "sim: flash attention takes head_dims up to 256 in steps of 8, found ", q.size(3));
  for (const at::Tensor& each : {q, k, v}) {
    TORCH_CHECK(each.size(3) == q.size(3) && each.stride(3) == 1 && each.numel() > 0,
                "sim: flash attention takes dense heads of one length, found ", each.sizes(),
                " with strides ", each.strides());
  }
  TORCH_CHECK(dropout == 0.0, "sim: no dropout inside attention");
}

/// In the order of memory of another of its sizes, as flash attention makes its results.
at::Tensor laid_out_as(const at::Tensor& other, const at::Tensor& values) {
  return at::empty_like(other).copy_(values);
}

/// Adds zeros in front of the queries until there are as many as keys: the CPU's causal mask lets the
/// first query see the first key, CUDA's the last one the last. Works on queries, their gradients,
/// results [B, H, T, .] and sums [B, H, T].
at::Tensor as_many_as(const at::Tensor& keys, const at::Tensor& of_queries) {
  const std::int64_t missing = keys.size(2) - of_queries.size(2);
  TORCH_CHECK(missing >= 0, "sim: flash attention has no keys for ", -missing, " queries");
  if (missing == 0) return of_queries;
  auto sizes = of_queries.sizes().vec();
  sizes[2] = missing;
  return at::cat({at::zeros(sizes, of_queries.options()), of_queries}, 2);
}

/// The inverse.
at::Tensor last_of(const at::Tensor& padded, const at::Tensor& q) {
  return padded.narrow(2, padded.size(2) - q.size(2), q.size(2));
}

at::Tensor for_every_query(const at::Tensor& keys, std::int64_t heads) {
  return keys.repeat_interleave(heads / keys.size(1), 1);
}

using FlashResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt,
                                c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

FlashResults flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout,
                   bool causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  check_flash(q, k, v, dropout);
  auto [mixed, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      as_many_as(k, q), for_every_query(k, q.size(1)), for_every_query(v, q.size(1)), 0.0, causal,
      {}, scale);
  const at::Tensor nothing = at::empty({0}, at::kLong);
  return {laid_out_as(q, last_of(mixed, q)),
          last_of(log_sum, q).contiguous(),
          at::Tensor(),
          at::Tensor(),
          q.size(2),
          k.size(2),
          nothing,
          nothing,
          at::empty({0}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum, const at::Tensor& /*begins_q*/,
    const at::Tensor& /*begins_k*/, c10::SymInt /*most_q*/, c10::SymInt /*most_k*/, double dropout,
    bool causal, const at::Tensor& /*seed*/, const at::Tensor& /*offset*/,
    std::optional<double> scale) {
  check_flash(q, k, v, dropout);
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_many_as(k, grad), as_many_as(k, q), for_every_query(k, q.size(1)),
      for_every_query(v, q.size(1)), as_many_as(k, out), as_many_as(k, log_sum), 0.0, causal, {},
      scale);
  const auto of_keys = [&](const at::Tensor& of_queries, const at::Tensor& keys) {
    return of_queries.unflatten(1, {keys.size(1), -1}).sum(2);
  };
  return {laid_out_as(q, last_of(grad_q, q)), laid_out_as(k, of_keys(grad_k, k)),
          laid_out_as(v, of_keys(grad_v, v))};
}

/// Only where drawing is allowed; it is three operations here.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p,
                                                  std::optional<bool> train) {
  TORCH_CHECK(train.value_or(true), "sim: dropout outside of training draws nothing");
  const at::Tensor kept = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x * kept * (1 / (1 - p)), kept};
}

}  // namespace

void register_single_operations() {
  static auto* const library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const auto single = [&](const std::string& name) {
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  };
  for (const char* name :
       {"silu_backward", "mish_backward", "native_channel_shuffle", "native_layer_norm",
        "native_group_norm", "_stack", "_stack.out", "all.dims", "all.dims_out", "any.dims",
        "any.dims_out", "_fused_rms_norm", "_fused_rms_norm_backward", "_grouped_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}) {
    single(name);
  }
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    single(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
  }
}

}  // namespace tessera::sim

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_fused_rms_norm_backward", tessera::sim::rms_norm_backward);
  m.impl("_scaled_dot_product_flash_attention", tessera::sim::flash);
  m.impl("_scaled_dot_product_flash_attention_backward", tessera::sim::flash_backward);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", tessera::sim::native_dropout); }
