#include "nn/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "base/first_derivative.h"
#include "nn/linear.h"
#include "tessera/error.h"
#include "tessera/keep.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& x, const GroupOffsets& offsets, std::size_t group) {
  return x.narrow(0, offsets[group], offsets[group + 1] - offsets[group]);
}

/// [E, K, N], whatever the layout.
at::Tensor in_out(const at::Tensor& weight, GroupLayout layout) {
  return layout == GroupLayout::kInOut ? weight : weight.transpose(1, 2);
}

void check_sizes(const at::Tensor& x, const GroupedWeights& weights, const GroupOffsets& offsets) {
  const at::Tensor matrices = in_out(weights.weight, weights.layout);
  TESSERA_INVARIANT(static_cast<std::int64_t>(offsets.size()) == matrices.size(0) + 1 &&
                        offsets.front() == 0 && offsets.back() == x.size(0),
                    "offsets that are not those of the groups");
  TESSERA_INVARIANT(x.size(1) == matrices.size(1), "rows of ", x.sizes(), " for matrices of ",
                    matrices.sizes());
  TESSERA_INVARIANT(!weights.bias.defined() || (weights.bias.size(0) == matrices.size(0) &&
                                                weights.bias.size(1) == matrices.size(2)),
                    "a bias of ", weights.bias.sizes(), " for matrices of ", matrices.sizes());
}

void add_bias(const at::Tensor& y, const at::Tensor& bias, const GroupOffsets& offsets) {
  const at::Tensor own = bias.to(y.scalar_type());
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    rows_of(y, offsets, e).add_(own.select(0, static_cast<std::int64_t>(e)));
  }
}

/// Rows of a group summed, in the bias's sizes and dtype.
at::Tensor bias_gradient(const at::Tensor& grad, at::IntArrayRef sizes,
                         const at::TensorOptions& options, const GroupOffsets& offsets) {
  const at::Tensor result = at::empty(sizes, options);
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    at::Tensor part = result.select(0, static_cast<std::int64_t>(e));
    at::sum_out(part, rows_of(grad, offsets, e), {0}, /*keepdim=*/false, result.scalar_type());
  }
  return result;
}

struct GroupedLinearFunction : torch::autograd::Function<GroupedLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, GroupLayout layout,
                            const GroupOffsets& offsets) {
    weight.const_data_ptr();    // a parameter without data says so here, not from inside a product
    const WideScope own_dtype;  // the result has the input's
    const at::Tensor x = input.to(weight.scalar_type()).contiguous();
    const at::Tensor matrices = in_out(weight, layout);
    const at::Tensor y = keep({x.size(0), matrices.size(2)}, [&] {
      const at::Tensor product = grouped_rows(x, matrices, offsets, grouped_way(x, matrices));
      if (bias) add_bias(product, *bias, offsets);
      return product;
    });
    ctx->set_materialize_grads(false);
    // A frozen weight has no use for its input.
    ctx->save_for_backward(
        {weight.requires_grad() ? x : at::Tensor(), weight, bias.value_or(at::Tensor())});
    ctx->saved_data["layout"] = static_cast<std::int64_t>(layout);
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["input_dtype"] = input.scalar_type();
    return y.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(5);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& bias = saved[2];
    const auto layout = static_cast<GroupLayout>(ctx->saved_data["layout"].toInt());
    const GroupOffsets offsets = ctx->saved_data["offsets"].toIntVector();
    const at::Tensor grad = grads[0].to(weight.scalar_type()).contiguous();
    variable_list result(5);
    if (ctx->needs_input_grad(0)) {
      const at::Tensor back = in_out(weight, layout).transpose(1, 2);
      result[0] = grouped_rows(grad, back, offsets, grouped_way(grad, back))
                      .to(ctx->saved_data["input_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      const at::Tensor& left = layout == GroupLayout::kOutIn ? grad : x;
      const at::Tensor& right = layout == GroupLayout::kOutIn ? x : grad;
      result[1] = weight_gradient(weight, [left, right, offsets] {
        return grouped_outer(left, right, offsets, grouped_way(left, right));
      });
    }
    // Edges are counted over tensors: there is none for a bias that is not there.
    if (bias.defined() && ctx->needs_input_grad(2)) {
      // The bias itself may be given back before the sum is formed.
      result[2] =
          weight_gradient(bias, [grad, sizes = bias.sizes().vec(), options = bias.options(),
                                 offsets] { return bias_gradient(grad, sizes, options, offsets); });
    }
    return result;
  }
};

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const GroupedWeights& weights,
                          const GroupOffsets& offsets) {
  check_sizes(x, weights, offsets);
  return GroupedLinearFunction::apply(
      x, weights.weight, weights.bias.defined() ? std::make_optional(weights.bias) : std::nullopt,
      weights.layout, offsets);
}

at::Tensor grouped_linear_composite(const at::Tensor& x, const GroupedWeights& weights,
                                    const GroupOffsets& offsets) {
  check_sizes(x, weights, offsets);
  const at::Tensor matrices = in_out(weights.weight, weights.layout);
  std::vector<at::Tensor> parts;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto group = static_cast<std::int64_t>(e);
    const at::Tensor y =
        at::mm(rows_of(x, offsets, e).to(matrices.scalar_type()), matrices.select(0, group));
    parts.push_back(weights.bias.defined() ? y + weights.bias.select(0, group) : y);
  }
  return at::cat(parts, 0).to(x.scalar_type());
}

}  // namespace tessera::nn
