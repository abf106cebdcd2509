#include "moe/expert_parallel.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "parallel/transitions.h"
#include "tessera/error.h"

namespace tessera::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rows in another order; the way back needs no addition.
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

/// Without an order (undefined): the rows themselves.
at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& inverse) {
  return order.defined() ? ReorderFunction::apply(rows, order, inverse) : rows;
}

/// What every rank tells every other: rows for each of its experts, and whether they require a
/// gradient.
class Counts {
 public:
  Counts(std::int64_t local_experts, int ranks)
      : width_(local_experts + 1), values_(at::empty({ranks, width_}, at::kLong)) {}
  explicit Counts(const at::Tensor& values) : width_(values.size(1)), values_(values) {}

  std::int64_t& rows(int rank, std::int64_t expert) { return row(rank)[expert]; }
  std::int64_t& differentiable(int rank) { return row(rank)[width_ - 1]; }
  std::int64_t rows(int rank) {
    std::int64_t sum = 0;
    for (std::int64_t e = 0; e + 1 < width_; ++e) sum += rows(rank, e);
    return sum;
  }
  const at::Tensor& values() const { return values_; }

 private:
  std::int64_t* row(int rank) { return values_.mutable_data_ptr<std::int64_t>() + rank * width_; }

  std::int64_t width_;
  at::Tensor values_;
};

Counts counts_of(const nn::GroupOffsets& offsets, std::int64_t local_experts, int ranks,
                 bool differentiable) {
  Counts counts(local_experts, ranks);
  std::size_t expert = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::int64_t e = 0; e < local_experts; ++e, ++expert) {
      counts.rows(rank, e) = offsets[expert + 1] - offsets[expert];
    }
    counts.differentiable(rank) = differentiable ? 1 : 0;
  }
  return counts;
}

/// Arrived by (source, expert), wanted by (expert, source).
void order_by_expert(Counts& received, std::int64_t local_experts, Journey& journey) {
  const int ranks = journey.axis.size;
  std::int64_t total = 0;
  std::vector<std::int64_t> begin;  // of (source, expert) as they arrived
  for (int source = 0; source < ranks; ++source) {
    for (std::int64_t e = 0; e < local_experts; ++e) {
      begin.push_back(total);
      total += received.rows(source, e);
    }
  }
  if (local_experts == 1) {
    journey.offsets = {0, total};
    return;
  }
  journey.arrival_of_row = at::empty({total}, at::kLong);
  journey.row_of_arrival = at::empty({total}, at::kLong);
  auto* arrival = journey.arrival_of_row.mutable_data_ptr<std::int64_t>();
  auto* row = journey.row_of_arrival.mutable_data_ptr<std::int64_t>();
  std::int64_t next = 0;
  journey.offsets = {0};
  for (std::int64_t e = 0; e < local_experts; ++e) {
    for (int source = 0; source < ranks; ++source) {
      const auto first = begin[static_cast<std::size_t>(source * local_experts + e)];
      for (std::int64_t i = 0; i < received.rows(source, e); ++i, ++next) {
        arrival[next] = first + i;
        row[first + i] = next;
      }
    }
    journey.offsets.push_back(next);
  }
}

}  // namespace

Journey plan_journey(const nn::GroupOffsets& offsets, const at::Tensor& rows,
                     const parallel::Axis& axis, const std::string& where) {
  const auto experts = static_cast<std::int64_t>(offsets.size()) - 1;
  TESSERA_CHECK(experts % axis.size == 0, ErrorKind::kConfig, where, ": found ", experts,
                " experts for ", axis.size, " ranks, expected a multiple (axis ", axis.name,
                "); set parallelism.expert_parallel_degree to a divisor");
  const std::int64_t local = experts / axis.size;
  Journey journey;
  journey.axis = axis;
  journey.where = where;
  Counts sent = counts_of(offsets, local, axis.size, rows.requires_grad());
  const parallel::Splits even{std::vector<std::int64_t>(static_cast<std::size_t>(axis.size), 1),
                              std::vector<std::int64_t>(static_cast<std::size_t>(axis.size), 1)};
  Counts received(parallel::exchange_rows(sent.values(), axis, even, where + " counts"));
  for (int rank = 0; rank < axis.size; ++rank) {
    journey.splits.sends.push_back(sent.rows(rank));
    journey.splits.receives.push_back(received.rows(rank));
    journey.differentiable = journey.differentiable || received.differentiable(rank) != 0;
  }
  order_by_expert(received, local, journey);
  if (local > 1) {
    journey.arrival_of_row = journey.arrival_of_row.to(rows.device());
    journey.row_of_arrival = journey.row_of_arrival.to(rows.device());
  }
  return journey;
}

at::Tensor to_experts(const at::Tensor& rows, const Journey& journey) {
  // Else the others would wait for this rank's part of the way back.
  const bool joins = journey.differentiable && !rows.requires_grad() && c10::GradMode::is_enabled();
  const at::Tensor leaving = joins ? rows.detach().requires_grad_(true) : rows;
  const at::Tensor arrived =
      parallel::all_to_all(leaving, journey.axis, journey.splits, journey.where + " dispatch");
  return reordered(arrived, journey.arrival_of_row, journey.row_of_arrival);
}

at::Tensor from_experts(const at::Tensor& rows, const Journey& journey) {
  const at::Tensor by_source = reordered(rows, journey.row_of_arrival, journey.arrival_of_row);
  return parallel::all_to_all(by_source, journey.axis, journey.splits.swapped(),
                              journey.where + " combine");
}

}  // namespace tessera::moe
