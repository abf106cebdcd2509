#include "moe/experts.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "moe/expert_parallel.h"
#include "moe/host_read.h"
#include "nn/first_derivative.h"
#include "tessera/dtype_watch.h"

namespace tessera::moe {
namespace {

using nn::refuse_double_backward;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor token_of_row(const at::Tensor& slot_of_row, std::int64_t experts_per_token) {
  return slot_of_row.floor_divide(experts_per_token);
}

struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot,
                            std::int64_t experts_per_token) {
    ctx->save_for_backward({row_of_slot});
    ctx->saved_data["k"] = experts_per_token;
    return x.index_select(0, token_of_row(slot_of_row, experts_per_token));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const at::Tensor row_of_slot = ctx->get_saved_variables()[0];
    const std::int64_t k = ctx->saved_data["k"].toInt();
    const at::Tensor by_slot = grads[0].index_select(0, row_of_slot);
    const std::int64_t tokens = row_of_slot.numel() / k;
    return {by_slot.view({tokens, k, by_slot.size(1)}).sum(1), at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

/// picked * weight in the weight's dtype, rounded to the rows'.
at::Tensor scaled(const at::Tensor& rows, const at::Tensor& factors) {
  return (rows.to(factors.scalar_type()) * factors).to(rows.scalar_type());
}

/// [rows, 1]: the weight of each row.
at::Tensor weight_of_row(const at::Tensor& weights, const at::Tensor& slot_of_row) {
  return weights.reshape({-1}).index_select(0, slot_of_row).unsqueeze(1);
}

/// Of a product of rows and weights, both in the weights' dtype: <grad, row> for each slot.
at::Tensor weight_gradient(const at::Tensor& grad, const at::Tensor& rows,
                           const at::Tensor& weights, const at::Tensor& row_of_slot) {
  return (grad * rows.to(weights.scalar_type()))
      .sum(1)
      .index_select(0, row_of_slot)
      .view(weights.sizes());
}

struct CombineFunction : torch::autograd::Function<CombineFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot) {
    const WideScope products;  // in the dtype of the routing weights, summed in that of the rows
    const at::Tensor by_slot = row_of_slot.view(weights.sizes());
    at::Tensor sum;
    for (std::int64_t k = 0; k < weights.size(1); ++k) {
      const at::Tensor part =
          scaled(rows.index_select(0, by_slot.select(1, k)), weights.narrow(1, k, 1));
      sum = k == 0 ? part : sum.add_(part);
    }
    ctx->save_for_backward({rows, weights, slot_of_row, row_of_slot});
    return sum;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& rows = saved[0];
    const at::Tensor& weights = saved[1];
    const at::Tensor grad =
        grads[0].index_select(0, token_of_row(saved[2], weights.size(1))).to(weights.scalar_type());
    variable_list result(4);
    if (ctx->needs_input_grad(0)) {
      result[0] = (grad * weight_of_row(weights, saved[2])).to(rows.scalar_type());
    }
    if (ctx->needs_input_grad(1)) result[1] = weight_gradient(grad, rows, weights, saved[3]);
    return result;
  }
};

struct SumSlotsFunction : torch::autograd::Function<SumSlotsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot,
                            std::int64_t experts_per_token) {
    const at::Tensor by_slot = row_of_slot.view({-1, experts_per_token});
    at::Tensor sum;
    for (std::int64_t k = 0; k < experts_per_token; ++k) {
      const at::Tensor part = rows.index_select(0, by_slot.select(1, k));
      sum = k == 0 ? part : sum.add_(part);
    }
    ctx->save_for_backward({slot_of_row});
    ctx->saved_data["k"] = experts_per_token;
    return sum;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const at::Tensor slot_of_row = ctx->get_saved_variables()[0];
    const at::Tensor token = token_of_row(slot_of_row, ctx->saved_data["k"].toInt());
    return {grads[0].index_select(0, token), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct ScaleRowsFunction : torch::autograd::Function<ScaleRowsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot) {
    const WideScope products;  // in the dtype of the routing weights
    ctx->save_for_backward({rows, weights, slot_of_row, row_of_slot});
    return scaled(rows, weight_of_row(weights, slot_of_row));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& rows = saved[0];
    const at::Tensor& weights = saved[1];
    variable_list result(4);
    if (ctx->needs_input_grad(0)) result[0] = scaled(grads[0], weight_of_row(weights, saved[2]));
    if (ctx->needs_input_grad(1)) {
      result[1] = weight_gradient(grads[0].to(weights.scalar_type()), rows, weights, saved[3]);
    }
    return result;
  }
};

}  // namespace

Dispatch dispatch(const at::Tensor& indices, std::int64_t experts, at::Device device) {
  Dispatch result;
  result.experts_per_token = indices.size(1);
  const auto* expert = indices.const_data_ptr<std::int64_t>();
  const std::int64_t slots = indices.numel();
  result.offsets.assign(static_cast<std::size_t>(experts) + 1, 0);
  for (std::int64_t i = 0; i < slots; ++i) {
    ++result.offsets.at(static_cast<std::size_t>(expert[i]) + 1);
  }
  for (std::size_t e = 1; e < result.offsets.size(); ++e) {
    result.offsets[e] += result.offsets[e - 1];
  }
  nn::GroupOffsets next = result.offsets;
  const at::Tensor slot_of_row = at::empty({slots}, at::kLong);
  const at::Tensor row_of_slot = at::empty({slots}, at::kLong);
  auto* slot = slot_of_row.mutable_data_ptr<std::int64_t>();
  auto* row = row_of_slot.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < slots; ++i) {
    row[i] = next[static_cast<std::size_t>(expert[i])]++;
    slot[row[i]] = i;
  }
  result.slot_of_row = to_device(slot_of_row, device);
  result.row_of_slot = to_device(row_of_slot, device);
  return result;
}

at::Tensor gather_tokens(const at::Tensor& x, const Dispatch& dispatch) {
  return GatherFunction::apply(x, dispatch.slot_of_row, dispatch.row_of_slot,
                               dispatch.experts_per_token);
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch) {
  if (!weights.defined()) {
    return SumSlotsFunction::apply(rows, dispatch.slot_of_row, dispatch.row_of_slot,
                                   dispatch.experts_per_token);
  }
  return CombineFunction::apply(rows, weights, dispatch.slot_of_row, dispatch.row_of_slot);
}

at::Tensor scale_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch) {
  return ScaleRowsFunction::apply(rows, weights, dispatch.slot_of_row, dispatch.row_of_slot);
}

Activation of_halves(at::Tensor (*gated)(const at::Tensor& gate, const at::Tensor& up)) {
  return [gated](const at::Tensor& both) {
    const std::int64_t inner = both.size(1) / 2;
    return gated(both.narrow(1, 0, inner), both.narrow(1, inner, inner));
  };
}

namespace {

at::Tensor compute(const at::Tensor& rows, const ExpertWeights& weights,
                   const nn::GroupOffsets& offsets, const Activation& activation) {
  const at::Tensor both =
      nn::grouped_linear(rows, {weights.gate_up, weights.gate_up_bias, weights.layout}, offsets);
  return nn::grouped_linear(activation(both), {weights.down, weights.down_bias, weights.layout},
                            offsets);
}

}  // namespace

at::Tensor experts(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights,
                   const ExpertOptions& options) {
  const std::int64_t count = weights.gate_up.size(0) * options.ep.size;
  const bool before = options.score == Score::kBeforeExperts;
  const bool follows = x.requires_grad() || (before && routing.weights.requires_grad());
  const Travel travel{follows && c10::GradMode::is_enabled(), options.ep, options.name};
  const at::Tensor nothing = at::empty({0}, routing.indices.options());
  const std::vector<at::Tensor> read = read_on_host(
      {routing.indices, routing.finite.defined() ? routing.finite : nothing,
       options.ep.alone() ? nothing : exchange_counts(routing.indices, count, travel)});
  if (routing.finite.defined()) check_finite(routing, read[1]);

  const Dispatch order = dispatch(read[0], count, x.device());
  at::Tensor rows = gather_tokens(x, order);
  if (before) rows = scale_rows(rows, routing.weights, order);
  at::Tensor out;
  if (options.ep.alone()) {
    out = compute(rows, weights, order.offsets, options.activation);
  } else {
    const Journey journey = plan_journey(order.offsets, read[2], travel, x.device());
    const at::Tensor here = to_experts(rows, journey);
    out = from_experts(compute(here, weights, journey.offsets, options.activation), journey);
  }
  return combine(out, before ? at::Tensor() : routing.weights, order);
}

}  // namespace tessera::moe
