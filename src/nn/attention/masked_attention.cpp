#include "nn/attention/masked_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "kernels/seen_blocks.h"
#include "nn/documents.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WindowedAttentionFunction : torch::autograd::Function<WindowedAttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& keys,
                            const at::Tensor& values, const std::optional<at::Tensor>& sinks,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
    ctx->set_materialize_grads(false);
    const at::Tensor none;
    ctx->save_for_backward(
        {q, keys, values, sinks.value_or(none), begins.value_or(none), ends.value_or(none)});
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    return kernels::windowed_attention(q, keys, values, sinks, begins, ends,
                                       keys.size(2) - q.size(2), window, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(8);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_q, grad_keys, grad_values, grad_sinks] = kernels::windowed_attention_backward(
        grads[0], saved[0], saved[1], saved[2], given(saved[3]), given(saved[4]), given(saved[5]),
        saved[1].size(2) - saved[0].size(2), ctx->saved_data["window"].toInt(),
        ctx->saved_data["scale"].toDouble(), saved[3].defined() && ctx->needs_input_grad(3));
    const at::Tensor none;
    return {grad_q,
            grad_keys.to(saved[1].scalar_type()),
            grad_values.to(saved[2].scalar_type()),
            grad_sinks,
            none,
            none,
            none,
            none};
  }
};

}  // namespace

at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionMask& mask, double scale) {
  const WideScope inside;
  // Autograd takes no undefined tensor for a variable.
  return WindowedAttentionFunction::apply(q, keys, values, given(mask.sinks), given(mask.begins),
                                          given(mask.ends),
                                          mask.window.value_or(kernels::kNoWindow), scale);
}

}  // namespace tessera::nn
