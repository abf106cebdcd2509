#include "nn/vocab_parallel.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/embedding.h"
#include "nn/first_derivative.h"
#include "parallel/exchange.h"
#include "tessera/dtype_watch.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The ids of the axis' rank, in its own numbers; where they are another rank's.
struct OwnIds {
  OwnIds(const at::Tensor& ids, std::int64_t size, const parallel::Axis& axis)
      : local(ids - axis.rank * size), elsewhere(local.lt(0).logical_or(local.ge(size))) {}
  at::Tensor local;
  at::Tensor elsewhere;
};

/// [rows] each: over all ranks the largest logit, the sum of exp(logit - largest), the target's
/// logit.
struct Merged {
  at::Tensor largest;
  at::Tensor sum;
  at::Tensor target;
};

Merged merge(const Merged& own, const parallel::Axis& axis) {
  const at::Tensor mine = at::stack({own.largest, own.sum, own.target}).unsqueeze(0);
  const at::Tensor all = parallel::exchange_gather(mine, axis, {0}, "loss");
  Merged merged;
  merged.largest = all.select(1, 0).amax(0);
  const at::Tensor scaled = all.select(1, 1) * (all.select(1, 0) - merged.largest).exp();
  merged.sum = scaled.sum(0);
  merged.target = all.select(1, 2).sum(0);
  return merged;
}

Merged own_part(const at::Tensor& logits, const OwnIds& targets) {
  Merged own;
  own.largest = logits.amax(1);
  own.sum = (logits - own.largest.unsqueeze(1)).exp_().sum(1);
  const at::Tensor column = targets.local.masked_fill(targets.elsewhere, 0).unsqueeze(1);
  own.target = logits.gather(1, column).squeeze(1).masked_fill(targets.elsewhere, 0);
  return own;
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& targets, const parallel::Axis& axis, Logits use) {
    const WideScope loss;
    const std::int64_t size = logits.size(2);
    const at::Tensor flat = logits.reshape({-1, size});
    const at::Tensor wide = flat.to(at::promote_types(logits.scalar_type(), at::kFloat));
    const at::Tensor wanted = targets.reshape({-1});
    const at::Tensor kept = wanted.ne(kIgnoredLabel);
    const OwnIds own(wanted, size, axis);
    const Merged merged = merge(own_part(wide, own), axis);
    const at::Tensor normalizer = merged.largest + merged.sum.log();
    ctx->save_for_backward({flat, normalizer, own.local, own.elsewhere, kept});
    ctx->saved_data["consume"] = use == Logits::kConsume;
    ctx->saved_data["shape"] = logits.sizes();
    return (normalizer - merged.target).masked_fill(kept.logical_not(), 0).sum();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const at::Tensor& normalizer = saved[1];
    const at::Tensor& elsewhere = saved[3];
    const at::Tensor& kept = saved[4];
    const bool in_place =
        ctx->saved_data["consume"].toBool() && logits.scalar_type() == normalizer.scalar_type();
    const at::Tensor wide = logits.to(normalizer.scalar_type());
    at::Tensor gradient = in_place ? wide.sub_(normalizer.unsqueeze(1))
                                   : wide - normalizer.unsqueeze(1);
    gradient.exp_();
    const at::Tensor column = saved[2].masked_fill(elsewhere, 0).unsqueeze(1);
    const at::Tensor one = elsewhere.logical_not().to(gradient.scalar_type()).unsqueeze(1);
    gradient.scatter_add_(1, column, one.neg());
    gradient.mul_((kept.to(gradient.scalar_type()) * grads[0]).unsqueeze(1));
    return {gradient.to(logits.scalar_type()).view(ctx->saved_data["shape"].toIntVector()),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    std::optional<std::int64_t> padding,
                                    const parallel::Axis& axis) {
  if (axis.size == 1) return embedding(ids, weight, padding);
  const std::int64_t size = weight.size(0);
  const OwnIds own(ids, size, axis);
  std::optional<std::int64_t> own_padding;
  if (padding && *padding / size == axis.rank) own_padding = *padding % size;
  const at::Tensor rows = embedding(own.local.masked_fill(own.elsewhere, 0), weight, own_padding);
  return rows.masked_fill(own.elsewhere.unsqueeze(-1), 0);
}

at::Tensor vocab_parallel_cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                                            Logits use, const parallel::Axis& axis) {
  if (axis.size == 1) return cross_entropy_sum(logits, targets, use);
  check_targets(logits, targets, logits.size(2) * axis.size);
  return CrossEntropy::apply(logits, targets, axis, use);
}

}  // namespace tessera::nn
