#include "nn/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <tuple>

#include "base/first_derivative.h"
#include "base/threads/shapes_only.h"
#include "comm/device.h"
#include "comm/host_read.h"
#include "tessera/error.h"
#include "tessera/keep.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The cheapest of 8, 16, 32 and 64 for experts with a hundred rows, skewed or even.
constexpr std::int64_t kRowStep = 16;

std::int64_t rounded_up(std::int64_t rows) { return (rows + kRowStep - 1) / kRowStep * kRowStep; }

std::int64_t count(const GroupOffsets& offsets, std::size_t group) {
  return offsets[group + 1] - offsets[group];
}

at::Tensor rows_of_group(const at::Tensor& x, const GroupOffsets& offsets, std::size_t group) {
  return x.narrow(0, offsets[group], count(offsets, group));
}

/// Whether libtorch takes its last two dims: one of them dense, the other's stride and the address
/// multiples of 16 bytes.
bool fits_libtorch(const at::Tensor& matrix) {
  constexpr std::int64_t kBytes = 16;
  const auto width = static_cast<std::int64_t>(matrix.element_size());
  const bool dense_rows = matrix.stride(-1) == 1 && matrix.stride(-2) >= matrix.size(-1);
  const bool dense_columns = matrix.stride(-2) == 1 && matrix.stride(-1) >= matrix.size(-2);
  const std::int64_t stride = dense_rows ? matrix.stride(-2) : matrix.stride(-1);
  return (dense_rows || dense_columns) && stride * width % kBytes == 0 &&
         matrix.size(-1) * width % kBytes == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix.const_data_ptr()) % kBytes == 0;
}

bool has_kernel(const at::Tensor& there) {
  return has_grouped_kernel(comm::facts_of(there.device()).capability);
}

/// The ends of the groups, as libtorch takes them, on the device of `like`.
at::Tensor ends(const RowGroups& groups, const at::Tensor& like) {
  if (groups.ends.defined()) return groups.ends;
  const GroupOffsets& offsets = groups.begins;
  const at::Tensor result = at::empty({static_cast<std::int64_t>(offsets.size()) - 1}, at::kInt);
  std::transform(offsets.begin() + 1, offsets.end(), result.mutable_data_ptr<std::int32_t>(),
                 [](std::int64_t end) { return static_cast<std::int32_t>(end); });
  return comm::uploaded(result, like.device());
}

/// A loop over no groups would leave its result as the memory was.
void require_begins(const GroupOffsets& offsets) {
  TESSERA_INVARIANT(!offsets.empty(), "a loop over groups whose begins only the device knows");
}

/// All groups; in a dry run the last one with rows, which takes what any of them does.
std::vector<std::size_t> groups_of(const GroupOffsets& offsets) {
  std::vector<std::size_t> groups(offsets.size() - 1);
  std::iota(groups.begin(), groups.end(), std::size_t{0});
  if (!base::shapes_only()) return groups;
  while (groups.size() > 1 && count(offsets, groups.back()) == 0) groups.pop_back();
  return {groups.back()};
}

at::Tensor rows_by_loop(const at::Tensor& a, const at::Tensor& b, const GroupOffsets& offsets) {
  const at::Tensor y = at::empty({a.size(0), b.size(2)}, a.options());
  for (const std::size_t e : groups_of(offsets)) {
    if (count(offsets, e) == 0) continue;
    at::Tensor part = rows_of_group(y, offsets, e);
    at::mm_out(part, rows_of_group(a, offsets, e), b.select(0, static_cast<std::int64_t>(e)));
  }
  return y;
}

/// A product that is rounded up runs into the rows of the groups that follow: they come later and
/// write over it. Only at the end the rows are copied.
at::Tensor rows_rounded_up(const at::Tensor& a, const at::Tensor& b, const GroupOffsets& offsets) {
  const at::Tensor y = at::empty({a.size(0), b.size(2)}, a.options());
  for (const std::size_t e : groups_of(offsets)) {
    const std::int64_t rows = count(offsets, e);
    if (rows == 0) continue;
    const std::int64_t more = rounded_up(rows);
    const at::Tensor matrix = b.select(0, static_cast<std::int64_t>(e));
    if (offsets[e] + more <= a.size(0)) {
      at::Tensor part = y.narrow(0, offsets[e], more);
      at::mm_out(part, a.narrow(0, offsets[e], more), matrix);
      continue;
    }
    const at::Tensor padded = at::empty({more, a.size(1)}, a.options());
    padded.narrow(0, 0, rows).copy_(rows_of_group(a, offsets, e));
    padded.narrow(0, rows, more - rows).zero_();
    rows_of_group(y, offsets, e).copy_(at::mm(padded, matrix).narrow(0, 0, rows));
  }
  return y;
}

void outer_by_loop(const at::Tensor& a, const at::Tensor& b, const GroupOffsets& offsets,
                   const at::Tensor& result) {
  for (const std::size_t e : groups_of(offsets)) {
    at::Tensor part = result.select(0, static_cast<std::int64_t>(e));
    if (count(offsets, e) == 0) {
      part.zero_();
    } else {
      at::mm_out(part, rows_of_group(a, offsets, e).t(), rows_of_group(b, offsets, e));
    }
  }
}

/// The rows of a group and zeros up to the next step, in `scratch`.
at::Tensor padded_rows(const at::Tensor& x, const GroupOffsets& offsets, std::size_t group,
                       const at::Tensor& scratch) {
  const std::int64_t rows = count(offsets, group);
  const std::int64_t more = rounded_up(rows);
  scratch.narrow(0, 0, rows).copy_(rows_of_group(x, offsets, group));
  scratch.narrow(0, rows, more - rows).zero_();
  return scratch.narrow(0, 0, more);
}

void outer_rounded_up(const at::Tensor& a, const at::Tensor& b, const GroupOffsets& offsets,
                      const at::Tensor& result) {
  std::int64_t most = 0;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) most = std::max(most, count(offsets, e));
  const at::Tensor left = at::empty({rounded_up(most), a.size(1)}, a.options());
  const at::Tensor right = at::empty({rounded_up(most), b.size(1)}, b.options());
  for (const std::size_t e : groups_of(offsets)) {
    at::Tensor part = result.select(0, static_cast<std::int64_t>(e));
    const std::int64_t rows = count(offsets, e);
    if (rows == 0) {
      part.zero_();
    } else if (rows % kRowStep == 0) {
      at::mm_out(part, rows_of_group(a, offsets, e).t(), rows_of_group(b, offsets, e));
    } else {
      at::mm_out(part, padded_rows(a, offsets, e, left).t(), padded_rows(b, offsets, e, right));
    }
  }
}

/// The loops of grouped_outer() into `result` [E, A, B].
void write_outer(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups, GroupedWay way,
                 const at::Tensor& result) {
  require_begins(groups.begins);
  way == GroupedWay::kRoundedRows ? outer_rounded_up(a, b, groups.begins, result)
                                  : outer_by_loop(a, b, groups.begins, result);
}

/// Returns the weight as [E, K, N] for any layout.
at::Tensor in_out(const at::Tensor& weight, GroupLayout layout) {
  return layout == GroupLayout::kInOut ? weight : weight.transpose(1, 2);
}

void check_sizes(const ProductInput& x, const GroupedWeights& weights, const RowGroups& groups) {
  const at::Tensor matrices = in_out(weights.weight, weights.layout);
  const GroupOffsets& begins = groups.begins;
  TESSERA_INVARIANT(begins.empty()
                        ? groups.ends.defined() && groups.ends.numel() == matrices.size(0)
                        : static_cast<std::int64_t>(begins.size()) == matrices.size(0) + 1 &&
                              begins.front() == 0 && begins.back() == x.x.size(0),
                    "offsets that are not those of the groups");
  TESSERA_INVARIANT(x.columns() == matrices.size(1), "rows of ", x.columns(), " for matrices of ",
                    matrices.sizes());
  TESSERA_INVARIANT(!weights.bias.defined() || (weights.bias.size(0) == matrices.size(0) &&
                                                weights.bias.size(1) == matrices.size(2)),
                    "a bias of ", weights.bias.sizes(), " for matrices of ", matrices.sizes());
}

/// [M]: which group a row belongs to.
at::Tensor group_of_row(const at::Tensor& ends, std::int64_t rows) {
  return at::searchsorted(ends, at::arange(rows, ends.options()), /*out_int32=*/true,
                          /*right=*/true);
}

void add_bias(const at::Tensor& y, const at::Tensor& bias, const RowGroups& groups) {
  const at::Tensor own = bias.to(y.scalar_type());
  if (groups.ends.defined()) {
    y.add_(own.index_select(0, group_of_row(groups.ends, y.size(0))));
    return;
  }
  const GroupOffsets& offsets = groups.begins;
  for (const std::size_t e : groups_of(offsets)) {
    rows_of_group(y, offsets, e).add_(own.select(0, static_cast<std::int64_t>(e)));
  }
}

void sum_groups(const at::Tensor& grad, const GroupOffsets& offsets, const at::Tensor& result) {
  for (const std::size_t e : groups_of(offsets)) {
    at::Tensor part = result.select(0, static_cast<std::int64_t>(e));
    at::sum_out(part, rows_of_group(grad, offsets, e), {0}, /*keepdim=*/false,
                result.scalar_type());
  }
}

/// Rows of a group summed, in the bias's sizes and dtype.
at::Tensor bias_gradient(const at::Tensor& grad, at::IntArrayRef sizes,
                         const at::TensorOptions& options, const RowGroups& groups) {
  const GroupOffsets& offsets = groups.begins;
  if (offsets.empty()) {
    const at::ScalarType dtype = options.dtype().toScalarType();
    if (dtype != grad.scalar_type()) {
      return at::zeros(sizes, options)
          .index_add_(0, group_of_row(groups.ends, grad.size(0)), grad.to(dtype));
    }
    // Ones, as many as a stride has to have, times the rows.
    const at::Tensor ones = at::ones({grad.size(0), 8}, grad.options());
    return grouped_outer(ones, grad, groups, grouped_way(ones, grad)).select(1, 0).contiguous();
  }
  const at::Tensor result = at::empty(sizes, options);
  sum_groups(grad, offsets, result);
  return result;
}

/// left_e^T right_e, of a weight.
grad::Product outer_of_groups(const at::Tensor& left, const at::Tensor& right,
                              const RowGroups& groups) {
  using Reads = grad::Product::Reads;
  const GroupedWay way = grouped_way(left, right);
  const std::int64_t count = groups.ends.defined()
                                 ? groups.ends.numel()
                                 : static_cast<std::int64_t>(groups.begins.size()) - 1;
  grad::Product product{
      .sizes = {count, left.size(1), right.size(1)},
      .dtype = left.scalar_type(),
      .reads = {left.detach(), right.detach()},
      .form = [groups, way](const Reads& of) { return grouped_outer(of[0], of[1], groups, way); }};
  // libtorch's product makes memory of its own. On the CPU it is the loop.
  if (way != GroupedWay::kLibtorch || left.is_cpu()) {
    product.write = [groups, way](const Reads& of, const at::Tensor& slot) {
      write_outer(of[0], of[1], groups, way, slot);
    };
  }
  return product;
}

/// Sums the rows of each group for a bias, whose own memory may be freed before they are.
grad::Product sums_of_groups(const at::Tensor& grad, const at::Tensor& bias,
                             const RowGroups& groups) {
  using Reads = grad::Product::Reads;
  grad::Product product{
      .sizes = bias.sizes().vec(),
      .dtype = bias.scalar_type(),
      .reads = {grad},
      .form = [groups, sizes = bias.sizes().vec(), options = bias.options()](const Reads& of) {
        return bias_gradient(of[0], sizes, options, groups);
      }};
  if (!groups.begins.empty()) {
    product.write = [groups](const Reads& of, const at::Tensor& slot) {
      sum_groups(of[0], groups.begins, slot);
    };
  }
  return product;
}

/// The arguments of a call that are not tensors.
struct GroupedCall {
  ProductInput::Kind kind;
  GroupLayout layout;
  grad::WeightGradient when;
};

/// The input of a product, as it takes it.
at::Tensor rows_of(ProductInput::Kind kind, const at::Tensor& x, const at::Tensor& up,
                   const at::Tensor& weight) {
  return formed_again(kind, x, up).to(weight.scalar_type()).contiguous();
}

struct GroupedLinearFunction : torch::autograd::Function<GroupedLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& second, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const GroupedCall& call,
                            const RowGroups& groups) {
    weight.const_data_ptr();    // a parameter without data says so here, not from inside a product
    const WideScope own_dtype;  // the result has the input's
    const bool is_gate = call.kind != ProductInput::Kind::kItself;
    const at::Tensor up = second ? second->contiguous() : at::Tensor();
    const at::Tensor x = is_gate ? input.contiguous() : rows_of(call.kind, input, up, weight);
    const at::Tensor matrices = in_out(weight, call.layout);
    const at::Tensor y = keep({x.size(0), matrices.size(2)}, [&] {
      const at::Tensor left = rows_of(call.kind, x, up, weight);
      const at::Tensor product = grouped_rows(left, matrices, groups, grouped_way(left, matrices));
      if (bias) add_bias(product, *bias, groups);
      return product;
    });
    ctx->set_materialize_grads(false);
    // A frozen weight has no use for its input.
    ctx->save_for_backward({is_gate || weight.requires_grad() ? x : at::Tensor(), up, weight,
                            bias.value_or(at::Tensor()), groups.ends});
    ctx->saved_data["kind"] = static_cast<std::int64_t>(call.kind);
    ctx->saved_data["layout"] = static_cast<std::int64_t>(call.layout);
    ctx->saved_data["when"] = static_cast<std::int64_t>(call.when);
    ctx->saved_data["begins"] = groups.begins;
    ctx->saved_data["input_dtype"] = input.scalar_type();
    return y.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &up = saved[1], &weight = saved[2], &bias = saved[3];
    const auto kind = static_cast<ProductInput::Kind>(ctx->saved_data["kind"].toInt());
    const auto layout = static_cast<GroupLayout>(ctx->saved_data["layout"].toInt());
    const RowGroups groups{ctx->saved_data["begins"].toIntVector(), saved[4]};
    const at::Tensor grad = grads[0].to(weight.scalar_type()).contiguous();
    // Edges are counted over tensors: there is none for one that is absent.
    const std::size_t of_weight = up.defined() ? 2 : 1;
    variable_list result(6);
    if (ctx->needs_input_grad(of_weight)) {
      const at::Tensor rows = rows_of(kind, x, up, weight);
      const at::Tensor& left = layout == GroupLayout::kOutIn ? grad : rows;
      const at::Tensor& right = layout == GroupLayout::kOutIn ? rows : grad;
      result[2] =
          grad::weight_gradient(weight, outer_of_groups(left, right, groups),
                                static_cast<grad::WeightGradient>(ctx->saved_data["when"].toInt()));
    }
    if (bias.defined() && ctx->needs_input_grad(of_weight + 1)) {
      result[3] = grad::weight_gradient(bias, sums_of_groups(grad, bias, groups));
    }
    // Last: on a device the weight's product is memory of its own, which is free again by now.
    if (ctx->needs_input_grad(0) || (up.defined() && ctx->needs_input_grad(1))) {
      const at::Tensor back = in_out(weight, layout).transpose(1, 2);
      const at::Tensor of_input = grouped_rows(grad, back, groups, grouped_way(grad, back))
                                      .to(ctx->saved_data["input_dtype"].toScalarType());
      std::tie(result[0], result[1]) = formed_backward(of_input, kind, x, up);
    }
    return result;
  }
};

}  // namespace

bool has_grouped_kernel(int capability) {
  const int major = capability / 10;
  return capability == 0 || major == 9 || major == 10;
}

GroupedWay grouped_way(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType dtype = a.scalar_type();
  if (dtype == at::kBFloat16 && a.device().is_cpu()) return GroupedWay::kRoundedRows;
  // The kernel of devices takes bf16: of others it would read the offsets on the host.
  const bool known = a.is_cpu() ? dtype == at::kFloat || dtype == at::kHalf
                                : dtype == at::kBFloat16 && has_kernel(a);
  const bool fits = known && a.size(0) > 0 && fits_libtorch(a) && fits_libtorch(b);
  return fits ? GroupedWay::kLibtorch : GroupedWay::kLoop;
}

bool needs_begins(const at::Tensor& weight) {
  constexpr std::int64_t kStep = 8;  // of 2 bytes
  return weight.is_cpu() || weight.scalar_type() != at::kBFloat16 || weight.size(1) % kStep != 0 ||
         weight.size(2) % kStep != 0 || !fits_libtorch(weight) || !has_kernel(weight);
}

at::Tensor grouped_rows(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups,
                        GroupedWay way) {
  switch (way) {
    case GroupedWay::kLibtorch:
      return at::_grouped_mm(a, b, ends(groups, a));
    case GroupedWay::kRoundedRows:
      require_begins(groups.begins);
      return rows_rounded_up(a, b, groups.begins);
    case GroupedWay::kLoop:
      break;
  }
  require_begins(groups.begins);
  return rows_by_loop(a, b, groups.begins);
}

at::Tensor grouped_outer(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups,
                         GroupedWay way) {
  if (way == GroupedWay::kLibtorch) return at::_grouped_mm(a.t(), b, ends(groups, a));
  require_begins(groups.begins);
  const auto count = static_cast<std::int64_t>(groups.begins.size()) - 1;
  at::Tensor result = at::empty({count, a.size(1), b.size(1)}, a.options());
  write_outer(a, b, groups, way, result);
  return result;
}

at::Tensor grouped_linear(const ProductInput& given, const GroupedWeights& weights,
                          const RowGroups& groups) {
  const ProductInput input = given.is_kept_as_gate() ? given : ProductInput(given.formed());
  check_sizes(input, weights, groups);
  return GroupedLinearFunction::apply(
      input.x, input.second(), weights.weight,
      weights.bias.defined() ? std::make_optional(weights.bias) : std::nullopt,
      GroupedCall{input.kind, weights.layout, weights.when}, groups);
}

at::Tensor grouped_linear_composite(const at::Tensor& x, const GroupedWeights& weights,
                                    const GroupOffsets& offsets) {
  check_sizes(x, weights, RowGroups{offsets});
  const at::Tensor matrices = in_out(weights.weight, weights.layout);
  std::vector<at::Tensor> parts;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto group = static_cast<std::int64_t>(e);
    const at::Tensor y =
        at::mm(rows_of_group(x, offsets, e).to(matrices.scalar_type()), matrices.select(0, group));
    parts.push_back(weights.bias.defined() ? y + weights.bias.select(0, group) : y);
  }
  return at::cat(parts, 0).to(x.scalar_type());
}

}  // namespace tessera::nn
