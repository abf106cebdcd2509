#include "moe/expert_exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "comm/host_read.h"
#include "moe/routing.h"
#include "tessera/error.h"

namespace tessera::moe {

at::Tensor order_of(const at::Tensor& numbers) {
  return at::argsort(numbers.to(at::kInt), /*stable=*/true, /*dim=*/0, /*descending=*/false);
}

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Reorders rows; backward needs no addition.
struct ReorderFunction : torch::autograd::Function<ReorderFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& order,
                            const at::Tensor& inverse) {
    ctx->save_for_backward({inverse});
    return rows.index_select(0, order);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    return {grads[0].index_select(0, ctx->get_saved_variables()[0]), at::Tensor(), at::Tensor()};
  }
};

/// Without an order (undefined) returns the rows themselves.
at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& inverse) {
  return order.defined() ? ReorderFunction::apply(rows, order, inverse) : rows;
}

/// The counts that ranks have exchanged, as the host has read them: the rows for each of its
/// experts, and whether they require a gradient.
class Counts {
 public:
  explicit Counts(const at::Tensor& values)
      : width_(values.size(1)), values_(values.const_data_ptr<std::int64_t>()) {}

  std::int64_t rows(int rank, std::int64_t expert) const { return row(rank)[expert]; }
  std::int64_t rows(int rank) const {
    return std::accumulate(row(rank), row(rank) + width_ - 1, std::int64_t{0});
  }
  bool differentiable(int rank) const { return row(rank)[width_ - 1] != 0; }

 private:
  const std::int64_t* row(int rank) const { return values_ + rank * width_; }

  std::int64_t width_;
  const std::int64_t* values_;
};

std::int64_t local_experts(std::int64_t experts, const DispatchOptions& options) {
  const parallel::Axis& axis = options.axis;
  TESSERA_CHECK(experts % axis.size == 0, ErrorKind::kConfig, options.where, ": found ", experts,
                " experts for ", axis.size, " ranks, expected a multiple (axis ", axis.name,
                "); set parallelism.expert_parallel_degree to a divisor");
  return experts / axis.size;
}

/// Computes the order: rows arrive by (source, expert) and are needed by (expert, source).
void order_by_expert(const Counts& received, std::int64_t local, DispatchPlan& dispatch_plan) {
  const int ranks = dispatch_plan.options.axis.size;
  nn::GroupOffsets& offsets = dispatch_plan.groups.begins;
  std::int64_t total = 0;
  std::vector<std::int64_t> begin;  // of (source, expert), in the order of arrival
  for (int source = 0; source < ranks; ++source) {
    for (std::int64_t e = 0; e < local; ++e) {
      begin.push_back(total);
      total += received.rows(source, e);
    }
  }
  if (local == 1) {
    offsets = {0, total};
    return;
  }
  dispatch_plan.arrival_of_row = at::empty({total}, at::kLong);
  dispatch_plan.row_of_arrival = at::empty({total}, at::kLong);
  auto* arrival = dispatch_plan.arrival_of_row.mutable_data_ptr<std::int64_t>();
  auto* row = dispatch_plan.row_of_arrival.mutable_data_ptr<std::int64_t>();
  std::int64_t next = 0;
  offsets = {0};
  for (std::int64_t e = 0; e < local; ++e) {
    for (int source = 0; source < ranks; ++source) {
      const auto first = begin[static_cast<std::size_t>(source * local + e)];
      for (std::int64_t i = 0; i < received.rows(source, e); ++i, ++next) {
        arrival[next] = first + i;
        row[first + i] = next;
      }
    }
    offsets.push_back(next);
  }
}

/// The same by the device's operations, for which the host does not wait. `received` is what the
/// host has read.
void order_on_device(const at::Tensor& received, std::int64_t local, at::Device device,
                     DispatchPlan& dispatch_plan) {
  const std::int64_t ranks = received.size(0);
  const at::Tensor of_experts = received.narrow(1, 0, local).contiguous();
  const auto* rows = of_experts.const_data_ptr<std::int64_t>();
  nn::GroupOffsets& offsets = dispatch_plan.groups.begins;
  offsets = {0};
  for (std::int64_t e = 0; e < local; ++e) {
    std::int64_t sum = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) sum += rows[rank * local + e];
    offsets.push_back(offsets.back() + sum);
  }
  const at::Tensor counts = comm::uploaded(of_experts, device);
  dispatch_plan.groups.ends = at::cumsum(counts.sum(0), 0, at::kInt);
  if (local == 1) return;
  const at::Tensor expert =
      at::arange(local, counts.options()).expand({ranks, local}).reshape({-1});
  dispatch_plan.arrival_of_row =
      order_of(at::repeat_interleave(expert, counts.view({-1}), 0, offsets.back()));
  dispatch_plan.row_of_arrival = inverse_of(dispatch_plan.arrival_of_row);
}

}  // namespace

std::vector<at::Tensor> exchange_counts(std::vector<at::Tensor> with, const at::Tensor& indices,
                                        std::int64_t experts, const DispatchOptions& options) {
  const int ranks = options.axis.size;
  const std::int64_t local = local_experts(experts, options);
  const at::Tensor differentiable =
      at::full({ranks, 1}, options.differentiable ? 1 : 0, indices.options());
  const at::Tensor sent =
      at::cat({count_load(indices, experts).view({ranks, local}), differentiable}, 1);
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(ranks), 1);
  return parallel::exchange_rows_to_host(std::move(with), sent, options.axis, {one_each, one_each},
                                         options.where + " counts");
}

DispatchPlan plan_dispatch(const nn::GroupOffsets& offsets, const at::Tensor& received,
                           const DispatchOptions& options, at::Device device) {
  const std::int64_t local = local_experts(static_cast<std::int64_t>(offsets.size()) - 1, options);
  DispatchPlan dispatch_plan;
  dispatch_plan.options = options;
  const Counts counts(received);
  for (int rank = 0; rank < options.axis.size; ++rank) {
    const auto first = static_cast<std::size_t>(rank * local);
    dispatch_plan.splits.sends.push_back(offsets[first + static_cast<std::size_t>(local)] -
                                         offsets[first]);
    dispatch_plan.splits.receives.push_back(counts.rows(rank));
    dispatch_plan.options.differentiable =
        dispatch_plan.options.differentiable || counts.differentiable(rank);
  }
  if (device.is_cpu()) {
    order_by_expert(counts, local, dispatch_plan);
  } else {
    order_on_device(received, local, device, dispatch_plan);
  }
  return dispatch_plan;
}

RowsToExperts begin_to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan,
                               std::function<void()> meanwhile_back) {
  // Otherwise the others would wait for this rank's part of the way back.
  const bool joins =
      dispatch_plan.options.differentiable && !rows.requires_grad() && c10::GradMode::is_enabled();
  const at::Tensor leaving = joins ? rows.detach().requires_grad_(true) : rows;
  return {parallel::begin_all_to_all(leaving, dispatch_plan.options.axis, dispatch_plan.splits,
                                     dispatch_plan.options.where + " dispatch",
                                     std::move(meanwhile_back))};
}

at::Tensor RowsToExperts::finish(const DispatchPlan& dispatch_plan) {
  return reordered(rows.finish(), dispatch_plan.arrival_of_row, dispatch_plan.row_of_arrival);
}

at::Tensor to_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan) {
  return begin_to_experts(rows, dispatch_plan).finish(dispatch_plan);
}

at::Tensor from_experts(const at::Tensor& rows, const DispatchPlan& dispatch_plan) {
  const at::Tensor by_source =
      reordered(rows, dispatch_plan.row_of_arrival, dispatch_plan.arrival_of_row);
  return parallel::all_to_all(by_source, dispatch_plan.options.axis, dispatch_plan.splits.swapped(),
                              dispatch_plan.options.where + " combine");
}

}  // namespace tessera::moe
