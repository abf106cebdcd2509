#include "moe/experts.h"

#include <ATen/ops/_embedding_bag_forward_only.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "base/first_derivative.h"
#include "base/threads/shapes_only.h"
#include "comm/host_read.h"
#include "grad/region.h"
#include "grad/weight_gradient.h"
#include "moe/routing.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Calls body(begin, count) over the rows in chunks: wider copies, or several copies, of a chunk
/// stay in the cache; on a device, where a chunk costs launches, they stay within 256 MiB.
template <class Body>
void in_blocks(std::int64_t rows, const at::Tensor& like, const Body& body) {
  constexpr std::int64_t kOfCache = std::int64_t{1} << 18, kOfDevice = std::int64_t{1} << 26;
  const std::int64_t columns = std::max<std::int64_t>(1, like.size(1));
  const std::int64_t step =
      std::max<std::int64_t>(1, (like.is_cpu() ? kOfCache : kOfDevice) / columns);
  // A dry run takes one chunk: all take the same memory.
  const std::int64_t end = base::shapes_only() ? std::min(step, rows) : rows;
  for (std::int64_t begin = 0; begin < end; begin += step) {
    body(begin, std::min(step, rows - begin));
  }
}

/// Returns the dtype in which rows are multiplied and added, for any dtype of inputs and result.
at::ScalarType inside(const at::Tensor& rows, const at::Tensor& weights) {
  const auto wide = at::promote_types(rows.scalar_type(), at::kFloat);
  return weights.defined() ? at::promote_types(wide, weights.scalar_type()) : wide;
}

at::Tensor token_of_row(const at::Tensor& slot_of_row, std::int64_t experts_per_token) {
  return slot_of_row.floor_divide(experts_per_token);
}

// On a device, bags of ATen's embeddings express a token's sum over its rows: one kernel gathers
// and adds them in the order of the slots, in fp32 (or a wider dtype), without a copy of the rows.
// Where the weights have another dtype than the rows, it takes a launch a slot.

/// Returns [M]: the beginning of the slots of each token.
at::Tensor begins_of_tokens(const at::Tensor& by_slot) {
  return at::arange(0, by_slot.numel(), by_slot.size(1), by_slot.options());
}

bool fits_bags(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& by_slot) {
  return !rows.is_cpu() && by_slot.numel() > 0 && rows.numel() > 0 &&
         (!weights.defined() || weights.scalar_type() == rows.scalar_type());
}

/// Returns [M, H] of rows [M*K, H], by_slot [M, K].
at::Tensor sum_of_bags(const at::Tensor& rows, const at::Tensor& weights,
                       const at::Tensor& by_slot) {
  constexpr std::int64_t kSum = 0;
  const auto factors =
      weights.defined() ? std::optional(weights.reshape({-1})) : std::optional<at::Tensor>();
  return std::get<0>(at::_embedding_bag_forward_only(
      rows, by_slot.reshape({-1}), begins_of_tokens(by_slot), /*scale_grad_by_freq=*/false, kSum,
      /*sparse=*/false, factors));
}

/// Returns the products of each token's gradient [M, H] with its rows: [M, K].
at::Tensor products_in_bags(const at::Tensor& grad, const at::Tensor& rows,
                            const at::Tensor& by_slot) {
  // The bags' own backward does not serve: CUDA has none in bf16.
  const at::Tensor of_tokens = rows.index_select(0, by_slot.reshape({-1}))
                                   .view({by_slot.size(0), by_slot.size(1), rows.size(1)});
  return at::bmm(of_tokens, grad.unsqueeze(2)).squeeze(2);
}

struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot,
                            std::int64_t experts_per_token) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({row_of_slot});
    ctx->saved_data["k"] = experts_per_token;
    return x.index_select(0, token_of_row(slot_of_row, experts_per_token));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const at::Tensor row_of_slot = ctx->get_saved_variables()[0];
    const std::int64_t k = ctx->saved_data["k"].toInt();
    const std::int64_t columns = grads[0].size(1);
    const std::int64_t tokens = row_of_slot.numel() / k;
    const at::Tensor by_token = row_of_slot.view({tokens, k});
    if (fits_bags(grads[0], {}, by_token)) {
      return {sum_of_bags(grads[0], {}, by_token), at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const at::Tensor result = at::empty({tokens, columns}, grads[0].options());
    in_blocks(tokens, result, [&](std::int64_t begin, std::int64_t count) {
      const at::Tensor rows = row_of_slot.narrow(0, begin * k, count * k);
      const at::Tensor by_slot = grads[0].index_select(0, rows).view({count, k, columns});
      result.narrow(0, begin, count).copy_(by_slot.sum(1));
    });
    return {result, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

/// Returns [rows, 1]: the weight of each row.
at::Tensor weight_of_row(const at::Tensor& weights, const at::Tensor& slot_of_row) {
  return weights.reshape({-1}).index_select(0, slot_of_row).unsqueeze(1);
}

/// Returns rows * factors [rows, 1], rounded to the rows' dtype.
at::Tensor scaled(const at::Tensor& rows, const at::Tensor& factors) {
  const at::ScalarType wide = inside(rows, factors);
  const at::Tensor result = at::empty_like(rows);
  in_blocks(rows.size(0), rows, [&](std::int64_t begin, std::int64_t count) {
    const auto part = [&](const at::Tensor& of) { return of.narrow(0, begin, count); };
    part(result).copy_(part(rows).to(wide) * part(factors));
  });
  return result;
}

at::Tensor sum_with_other_weights(const at::Tensor& rows, const at::Tensor& weights,
                                  const at::Tensor& by_slot, at::ScalarType wide) {
  const at::Tensor sum = at::zeros({by_slot.size(0), rows.size(1)}, rows.options().dtype(wide));
  for (std::int64_t k = 0; k < by_slot.size(1); ++k) {
    sum.addcmul_(rows.index_select(0, by_slot.select(1, k)), weights.select(1, k).unsqueeze(1));
  }
  return sum.to(rows.scalar_type());
}

/// Returns [M, H]: each token's rows, times their weights where there are any, added in the order
/// of the slots and rounded once.
at::Tensor sum_of_slots(const at::Tensor& rows, const at::Tensor& weights,
                        const at::Tensor& by_slot) {
  const WideScope sums;
  const at::ScalarType wide = inside(rows, weights);
  if (fits_bags(rows, weights, by_slot)) return sum_of_bags(rows, weights, by_slot);
  if (!rows.is_cpu() && weights.defined()) {
    return sum_with_other_weights(rows, weights, by_slot, wide);
  }
  const at::Tensor result = at::empty({by_slot.size(0), rows.size(1)}, rows.options());
  in_blocks(result.size(0), rows, [&](std::int64_t begin, std::int64_t count) {
    const auto slot = [&](const at::Tensor& of, std::int64_t k) {
      return of.narrow(0, begin, count).select(1, k);
    };
    at::Tensor sum;
    for (std::int64_t k = 0; k < by_slot.size(1); ++k) {
      const at::Tensor part = rows.index_select(0, slot(by_slot, k)).to(wide);
      if (weights.defined()) part.mul_(slot(weights, k).unsqueeze(1));
      sum = k == 0 ? part : sum.add_(part);
    }
    result.narrow(0, begin, count).copy_(sum);
  });
  return result;
}

/// Returns the gradients of rows and weights; `grad_of(begin, count)` is the gradient of the
/// products of those rows.
template <class GradOf>
variable_list product_gradients(AutogradContext* ctx, const GradOf& grad_of) {
  const variable_list saved = ctx->get_saved_variables();
  const at::Tensor& rows = saved[0];
  const at::Tensor& weights = saved[1];
  const at::ScalarType wide = inside(rows, weights);
  const at::Tensor factors = weight_of_row(weights, saved[2]);
  at::Tensor grad_rows, grad_factors;
  if (ctx->needs_input_grad(0)) grad_rows = at::empty_like(rows);
  if (ctx->needs_input_grad(1)) grad_factors = at::empty({rows.size(0)}, weights.options());
  in_blocks(rows.size(0), rows, [&](std::int64_t begin, std::int64_t count) {
    const auto part = [&](const at::Tensor& of) { return of.narrow(0, begin, count); };
    const at::Tensor grad = grad_of(begin, count).to(wide);
    if (grad_factors.defined()) part(grad_factors).copy_((grad * part(rows)).sum(1));
    if (grad_rows.defined()) part(grad_rows).copy_(grad * part(factors));
  });
  variable_list result(4);
  result[0] = grad_rows;
  if (grad_factors.defined()) {
    result[1] = grad_factors.index_select(0, saved[3]).view(weights.sizes());
  }
  return result;
}

struct CombineFunction : torch::autograd::Function<CombineFunction> {
  static variable_list in_bags(AutogradContext* ctx, const at::Tensor& grad,
                               const at::Tensor& token, const at::Tensor& by_slot) {
    const variable_list saved = ctx->get_saved_variables();
    variable_list result(4);
    // This comes first: it makes a copy of the rows and frees it before their gradient, as large,
    // is made.
    if (ctx->needs_input_grad(1)) {
      result[1] = products_in_bags(grad.contiguous(), saved[0], by_slot);
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = grad.index_select(0, token).mul_(weight_of_row(saved[1], saved[2]));
    }
    return result;
  }

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({rows, weights, slot_of_row, row_of_slot});
    return sum_of_slots(rows, weights, row_of_slot.view(weights.sizes()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor token = token_of_row(saved[2], saved[1].size(1));
    const at::Tensor by_slot = saved[3].view(saved[1].sizes());
    if (fits_bags(saved[0], saved[1], by_slot)) return in_bags(ctx, grads[0], token, by_slot);
    return product_gradients(ctx, [&](std::int64_t begin, std::int64_t count) {
      return grads[0].index_select(0, token.narrow(0, begin, count));
    });
  }
};

struct SumSlotsFunction : torch::autograd::Function<SumSlotsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot,
                            std::int64_t experts_per_token) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({slot_of_row});
    ctx->saved_data["k"] = experts_per_token;
    return sum_of_slots(rows, at::Tensor(), row_of_slot.view({-1, experts_per_token}));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    const at::Tensor slot_of_row = ctx->get_saved_variables()[0];
    const at::Tensor token = token_of_row(slot_of_row, ctx->saved_data["k"].toInt());
    return {grads[0].index_select(0, token), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct ScaleRowsFunction : torch::autograd::Function<ScaleRowsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& slot_of_row, const at::Tensor& row_of_slot) {
    const WideScope products;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({rows, weights, slot_of_row, row_of_slot});
    return scaled(rows, weight_of_row(weights, slot_of_row));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(4);  // [Note: left-out results]
    return product_gradients(ctx, [&](std::int64_t begin, std::int64_t count) {
      return grads[0].narrow(0, begin, count);
    });
  }
};

}  // namespace

Dispatch dispatch(const at::Tensor& indices, std::int64_t experts) {
  Dispatch result;
  result.experts_per_token = indices.size(1);
  if (!indices.is_cpu()) {
    result.slot_of_row = order_of(indices.reshape({-1}));
    result.row_of_slot = inverse_of(result.slot_of_row);
    result.ends = at::cumsum(count_load(indices, experts), 0, at::kInt);
    return result;
  }
  grad::refuse_recording("the host's order of experts");
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
  result.slot_of_row = at::empty({slots}, at::kLong);
  result.row_of_slot = at::empty({slots}, at::kLong);
  auto* slot = result.slot_of_row.mutable_data_ptr<std::int64_t>();
  auto* row = result.row_of_slot.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < slots; ++i) {
    row[i] = next[static_cast<std::size_t>(expert[i])]++;
    slot[row[i]] = i;
  }
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

/// Computes one of the two products, with its adapter's part where there is one.
at::Tensor product(const nn::ProductInput& input, const nn::GroupedWeights& weights,
                   const AdapterWeights& adapter, const nn::RowGroups& groups) {
  if (!adapter.a.defined()) return nn::grouped_linear(input, weights, groups);
  const at::Tensor rows = input.formed();  // which the adapter keeps in any case
  return add_expert_adapter(nn::grouped_linear(rows, weights, groups), rows, adapter, groups);
}

at::Tensor compute(const at::Tensor& rows, const ExpertWeights& weights,
                   const nn::RowGroups& groups, const Activation& activation,
                   grad::WeightGradient when = grad::WeightGradient::kMayWait) {
  const at::Tensor both =
      product(rows, {weights.gate_up, weights.gate_up_bias, weights.layout, when},
              weights.gate_up_adapter, groups);
  return product(activation(both), {weights.down, weights.down_bias, weights.layout, when},
                 weights.down_adapter, groups);
}

/// Computes each row on the rank of options.ep that has its expert.
at::Tensor compute_there(const at::Tensor& rows, const ExpertWeights& weights,
                         const DispatchPlan& dispatch_plan, const ExpertOptions& options) {
  RowsToExperts leaving =
      begin_to_experts(rows, dispatch_plan, [gate_up = weights.gate_up, down = weights.down] {
        grad::form_under_exchange(gate_up);
        grad::form_under_exchange(down);  // gate_up may be no leaf of a sharded model
      });
  if (options.meanwhile) options.meanwhile();
  const at::Tensor here = leaving.finish(dispatch_plan);
  // Where no rank's rows require a gradient none travels back: everything before is frozen.
  const auto when =
      here.requires_grad() ? grad::WeightGradient::kUnderExchange : grad::WeightGradient::kMayWait;
  return from_experts(compute(here, weights, dispatch_plan.groups, options.activation, when),
                      dispatch_plan);
}

/// Whether some product needs the begins of groups on the host.
bool need_begins(const ExpertWeights& weights) {
  const AdapterWeights& first = weights.gate_up_adapter;
  const AdapterWeights& second = weights.down_adapter;
  const at::Tensor all[] = {weights.gate_up, weights.down, first.a, first.b, second.a, second.b};
  return std::ranges::any_of(
      all, [](const at::Tensor& each) { return each.defined() && nn::needs_begins(each); });
}

/// Returns offsets from ends [E] i32 that the host has read.
nn::GroupOffsets offsets_of(const at::Tensor& ends) {
  grad::refuse_recording("the host's order of experts");
  nn::GroupOffsets offsets{0};
  const auto* end = ends.const_data_ptr<std::int32_t>();
  offsets.insert(offsets.end(), end, end + ends.numel());
  return offsets;
}

/// Values that the host reads for a call of experts: offsets of all experts, empty where they are
/// not read; the result of exchange_counts.
struct KnownOnHost {
  nn::GroupOffsets offsets;
  at::Tensor received;
};

KnownOnHost read_counts(const Routing& routing, const Dispatch& order, const ExpertWeights& weights,
                        const ExpertOptions& options, const DispatchOptions& dispatch_options) {
  KnownOnHost known;
  const bool on_cpu = routing.indices.is_cpu();
  if (!on_cpu && options.ep.alone() && order.slot_of_row.numel() > 0 && !need_begins(weights)) {
    ScoreChecks::note(routing, options.name);
    return known;
  }
  const std::vector<at::Tensor> counted{order.ends, routing.finite};
  const std::vector<at::Tensor> read =
      options.ep.alone()
          ? comm::read_on_host(counted, options.name)
          : exchange_counts(counted, routing.indices, weights.gate_up.size(0) * options.ep.size,
                            dispatch_options);
  if (routing.finite.defined()) check_finite(routing, read[1]);
  known.offsets = on_cpu ? order.offsets : offsets_of(read[0]);
  if (!options.ep.alone()) known.received = read.back();
  return known;
}

}  // namespace

at::Tensor experts(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights,
                   const ExpertOptions& options) {
  const std::int64_t count = weights.gate_up.size(0) * options.ep.size;
  const bool before = options.score == Score::kBeforeExperts;
  const bool follows = x.requires_grad() || (before && routing.weights.requires_grad());
  const DispatchOptions dispatch_options{follows && c10::GradMode::is_enabled(), options.ep,
                                         options.name};
  const Dispatch order = dispatch(routing.indices, count);
  const KnownOnHost known = read_counts(routing, order, weights, options, dispatch_options);

  at::Tensor rows = gather_tokens(x, order);
  if (before) rows = scale_rows(rows, routing.weights, order);
  at::Tensor out;
  if (options.ep.alone()) {
    if (options.meanwhile) options.meanwhile();
    out = compute(rows, weights, {known.offsets, order.ends}, options.activation);
  } else {
    out = compute_there(rows, weights,
                        plan_dispatch(known.offsets, known.received, dispatch_options, x.device()),
                        options);
  }
  return combine(out, before ? at::Tensor() : routing.weights, order);
}

}  // namespace tessera::moe
