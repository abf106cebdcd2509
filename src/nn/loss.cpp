#include "nn/loss.h"

#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log.h>
#include <ATen/ops/logsumexp.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "base/pass_local.h"
#include "base/random.h"
#include "kernels/kernels.h"
#include "nn/embedding.h"
#include "nn/wide_dtype.h"
#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using RowsHere = base::PassLocal<base::PassValue::kRowLosses, RowLosses*>;

/// logits [B, T, V], targets [B, T] -> [B, T]. log_sum: as the kernels give it; some give none.
at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets,
                        const at::Tensor& log_sum) {
  const WideScope loss;
  const at::ScalarType inside = wide_dtype(logits);
  const at::Tensor of_all = log_sum.numel() == targets.numel()
                                ? log_sum.view(targets.sizes())
                                : at::logsumexp(logits.to(inside), {2});
  const at::Tensor ignored = targets.eq(kIgnoredLabel);
  const at::Tensor number = targets.masked_fill(ignored, 0).unsqueeze(2);
  return (of_all - logits.gather(2, number).squeeze(2).to(inside)).masked_fill_(ignored, 0);
}

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits_input,
                            const at::Tensor& targets_input, bool consume) {
    const at::Tensor logits = logits_input.contiguous();
    const at::Tensor targets = targets_input.contiguous();
    auto [loss, log_sum] = kernels::cross_entropy_sum(logits, targets);
    if (RowLosses::wanted()) RowLosses::note(token_losses(logits, targets, log_sum));
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, targets, log_sum});
    ctx->saved_data["consume"] = consume;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &log_sum = saved[2];
    const at::Tensor none;
    if (!ctx->saved_data["consume"].toBool()) {
      return {kernels::cross_entropy_sum_backward(grads[0], logits, targets, log_sum), none, none};
    }
    const at::Tensor result = logits.detach();
    kernels::cross_entropy_sum_backward_over(grads[0], targets, log_sum, result);
    // A second backward through this graph would read gradients as logits: autograd now refuses it.
    logits.unsafeGetTensorImpl()->bump_version();
    return {result, none, none};
  }
};

void check_targets(const at::Tensor& logits, const at::Tensor& targets) {
  TESSERA_CHECK(logits.dim() == 3 && targets.dim() == 2 && logits.size(0) == targets.size(0) &&
                    logits.size(1) == targets.size(1),
                ErrorKind::kFormat, "loss: found logits ", logits.sizes(), " and targets ",
                targets.sizes(), ", expected [B, T, V] and [B, T]");
  if (targets.numel() == 0) return;
  check_range(targets, logits.size(2), kIgnoredLabel, "loss: found the label ");
}

/// Tokens as this rank numbers its own; `own` false: another rank's, and the number is 0.
struct OwnTokens {
  at::Tensor number;
  at::Tensor own;
};

OwnTokens own_tokens(const at::Tensor& tokens, std::int64_t rows, const parallel::Axis& axis) {
  const at::Tensor number = tokens - axis.rank * rows;
  const at::Tensor own = number.ge(0).logical_and(number.lt(rows));
  return {number.masked_fill(own.logical_not(), 0), own};
}

/// Returns for each row of logits [rows, columns] the largest, the sum of exponentials relative to
/// it, and the target's logit, 0 where another rank has it. [3, rows] in `inside`.
at::Tensor summarize(const at::Tensor& logits, const OwnTokens& targets, at::ScalarType inside) {
  const std::int64_t rows = logits.size(0);
  const at::Tensor result = at::empty({3, rows}, logits.options().dtype(inside));
  const std::int64_t step = kernels::rows_of_loss(logits);
  for (std::int64_t begin = 0; begin < rows; begin += step) {
    const std::int64_t count = std::min(step, rows - begin);
    const at::Tensor part = logits.narrow(0, begin, count).to(inside);
    const at::Tensor largest = part.amax(1, /*keepdim=*/true);
    result[0].narrow(0, begin, count).copy_(largest.squeeze(1));
    result[1].narrow(0, begin, count).copy_((part - largest).exp_().sum(1));
    const at::Tensor number = targets.number.narrow(0, begin, count).unsqueeze(1);
    const at::Tensor own = targets.own.narrow(0, begin, count);
    result[2]
        .narrow(0, begin, count)
        .copy_(part.gather(1, number).squeeze(1).masked_fill(own.logical_not(), 0));
  }
  return result;
}

struct Combined {
  at::Tensor log_sum;  ///< [rows], of the exponentials over the whole vocabulary
  at::Tensor target;   ///< [rows], the target's logit
};

/// Every rank has the same summaries, and adds them in the same order.
Combined combine(const at::Tensor& mine, const parallel::Axis& axis, const std::string& where) {
  const at::Tensor all = parallel::all_gather(mine.unsqueeze(0), axis, {0},
                                              parallel::To::kReplicate, where + " softmax");
  const at::Tensor largest = all.select(1, 0).amax(0);
  const at::Tensor sum = (all.select(1, 1) * at::exp(all.select(1, 0) - largest)).sum(0);
  return {at::log(sum) + largest, all.select(1, 2).sum(0)};
}

struct VocabParallelFunction : torch::autograd::Function<VocabParallelFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits_input,
                            const at::Tensor& targets_input, const VocabParallelLoss& options) {
    const WideScope loss;
    const at::Tensor logits = logits_input.contiguous();
    const at::Tensor targets = targets_input.reshape({-1});
    const std::int64_t columns = logits.size(2);
    const at::Tensor flat = logits.detach().view({targets.numel(), columns});
    const OwnTokens own = own_tokens(targets, columns, options.axis);
    const auto inside = wide_dtype(logits);
    const Combined found = combine(summarize(flat, own, inside), options.axis, options.name);
    const at::Tensor kept = targets.ne(kIgnoredLabel);
    const at::Tensor losses = (found.log_sum - found.target).masked_fill(kept.logical_not(), 0);
    if (RowLosses::wanted()) RowLosses::note(losses.view(targets_input.sizes()));
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, found.log_sum, own.number, own.own, kept});
    ctx->saved_data["consume"] = options.use == Logits::kConsume;
    return losses.sum(at::kDouble).to(inside);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const at::Tensor& log_sum = saved[1];
    const bool consume = ctx->saved_data["consume"].toBool();
    const std::int64_t columns = logits.size(2);
    const std::int64_t rows = log_sum.numel();
    const at::Tensor flat = logits.detach().view({rows, columns});
    const at::Tensor result = consume ? flat : at::empty_like(flat);
    const at::Tensor factor = saved[4].to(log_sum.scalar_type()) * grads[0];
    const at::Tensor target_factor = factor * saved[3].to(log_sum.scalar_type());
    const std::int64_t step = kernels::rows_of_loss(flat);
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const std::int64_t count = std::min(step, rows - begin);
      const auto part = [&](const at::Tensor& of) {
        return of.narrow(0, begin, count).unsqueeze(1);
      };
      at::Tensor grad = flat.narrow(0, begin, count).to(log_sum.scalar_type()) - part(log_sum);
      grad.exp_().mul_(part(factor));
      grad.scatter_add_(1, part(saved[2]), part(target_factor).neg());
      result.narrow(0, begin, count).copy_(grad);
    }
    // A second backward through this graph would read gradients as logits: autograd now refuses it.
    if (consume) logits.unsafeGetTensorImpl()->bump_version();
    return {result.view(logits.sizes()), at::Tensor(), at::Tensor()};
  }
};

struct SoftCapFunction : torch::autograd::Function<SoftCapFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& z, double cap) {
    at::Tensor capped = at::div(z, cap).tanh_().mul_(cap);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({capped});
    ctx->saved_data["cap"] = cap;
    return capped;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(2);  // [Note: left-out results]
    const at::Tensor capped = ctx->get_saved_variables()[0];
    // d tanh(u) = 1 - tanh(u)^2
    at::Tensor slope = at::div(capped, ctx->saved_data["cap"].toDouble());
    slope.square_().neg_().add_(1.0).mul_(grads[0]);
    return {slope, at::Tensor()};
  }
};

}  // namespace

RowLosses::RowLosses() : outer_(std::exchange(RowsHere::here(), this)) {}
RowLosses::~RowLosses() { RowsHere::here() = outer_; }

bool RowLosses::wanted() { return RowsHere::here() != nullptr && sample_place().has_value(); }

void RowLosses::note(const at::Tensor& losses) {
  const std::vector<std::int64_t> row{1};
  RowsHere::here()->noted_.push_back(
      {sample_place()->first_row, losses.sum(row, false, at::kDouble)});
}

at::Tensor next_token_targets(const at::Tensor& labels) {
  auto targets = at::full_like(labels, kIgnoredLabel);
  if (labels.numel() > 0) {
    const auto last = labels.size(1) - 1;
    targets.narrow(1, 0, last).copy_(labels.narrow(1, 1, last));
  }
  return targets;
}

std::int64_t count_kept(const at::Tensor& targets) {
  return targets.numel() == 0 ? 0 : targets.ne(kIgnoredLabel).sum().item<std::int64_t>();
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, Logits use) {
  check_targets(logits, targets);
  if (base::has_second_derivatives(logits)) {
    return std::get<0>(kernels::cross_entropy_sum(logits, targets));
  }
  return CrossEntropyFunction::apply(logits, targets, use == Logits::kConsume);
}

at::Tensor vocab_parallel_cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                                            const VocabParallelLoss& options) {
  if (options.axis.alone()) return cross_entropy_sum(logits, targets, options.use);
  TESSERA_CHECK(logits.dim() == 3 && targets.dim() == 2 && logits.size(0) == targets.size(0) &&
                    logits.size(1) == targets.size(1),
                ErrorKind::kFormat, "loss: found logits ", logits.sizes(), " and targets ",
                targets.sizes(), ", expected [B, T, V / ", options.axis.size, "] and [B, T]");
  check_range(targets, logits.size(2) * options.axis.size, kIgnoredLabel, "loss: found the label ");
  return VocabParallelFunction::apply(logits, targets, options);
}

at::Tensor soft_cap(const at::Tensor& z, double cap) { return SoftCapFunction::apply(z, cap); }

}  // namespace tessera::nn
