#include "moe/expert_adapter.h"

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "base/first_derivative.h"
#include "tessera/wide_scope.h"

namespace tessera::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Returns the rows of each expert times its matrix of b [E, K, N].
at::Tensor products(const at::Tensor& rows, const at::Tensor& b, const nn::RowGroups& groups) {
  return nn::grouped_rows(rows, b, groups, nn::grouped_way(rows, b));
}

at::Tensor outer_products(const at::Tensor& left, const at::Tensor& right,
                          const nn::RowGroups& groups) {
  return nn::grouped_outer(left, right, groups, nn::grouped_way(left, right));
}

/// Saves for backward: x in its own dtype, and [M, R].
struct ExpertAdapterFunction : torch::autograd::Function<ExpertAdapterFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& base, const at::Tensor& x,
                            const at::Tensor& a, const at::Tensor& b, double scale,
                            const nn::RowGroups& groups) {
    const WideScope own_dtype;  // the result has the experts'
    const at::Tensor input = x.to(a.scalar_type()).contiguous();
    const at::Tensor hidden = products(input, a.transpose(1, 2), groups);
    const at::Tensor delta = products(hidden, b.transpose(1, 2), groups).mul_(scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, a, b, hidden, groups.ends});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["begins"] = groups.begins;
    return (base.to(a.scalar_type()) + delta).to(base.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& a = saved[1];
    const at::Tensor& b = saved[2];
    const nn::RowGroups groups{ctx->saved_data["begins"].toIntVector(), saved[4]};
    const at::Tensor grad =
        (grads[0].to(a.scalar_type()) * ctx->saved_data["scale"].toDouble()).contiguous();
    const at::Tensor grad_hidden = products(grad, b, groups);
    variable_list result(6);
    if (ctx->needs_input_grad(0)) result[0] = grads[0];
    if (ctx->needs_input_grad(1)) {
      result[1] = products(grad_hidden, a, groups).to(x.scalar_type());
    }
    if (ctx->needs_input_grad(2)) {
      result[2] = outer_products(grad_hidden, x.to(a.scalar_type()).contiguous(), groups);
    }
    if (ctx->needs_input_grad(3)) result[3] = outer_products(grad, saved[3], groups);
    return result;
  }
};

}  // namespace

at::Tensor add_expert_adapter(const at::Tensor& base, const at::Tensor& x,
                              const AdapterWeights& adapter, const nn::RowGroups& groups) {
  // a parameter without data throws here, and not from inside a product
  adapter.a.const_data_ptr();
  adapter.b.const_data_ptr();
  return ExpertAdapterFunction::apply(base, x, adapter.a, adapter.b, adapter.scale, groups);
}

ExpertAdapter::ExpertAdapter(const AdapterSizes& sizes, const AdapterPlacement& placement,
                             double scale)
    : scale_(scale),
      a_(std::make_shared<Factor>(
          std::vector<std::int64_t>{sizes.experts, sizes.rank, sizes.in},
          nn::Declaration{.layout = placement.a, .init = nn::InitKind::kUniform})),
      b_(std::make_shared<Factor>(
          std::vector<std::int64_t>{sizes.experts, sizes.out, sizes.rank},
          nn::Declaration{
              .layout = placement.b, .init = nn::InitKind::kZeros, .fused = placement.fused})) {
  register_module("lora_A", a_);
  register_module("lora_B", b_);
}

}  // namespace tessera::moe
