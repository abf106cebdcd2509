#include "nn/vocab_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "base/first_derivative.h"
#include "nn/embedding.h"
#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

/// Errors: kFormat for a value outside 0..vocabulary-1, unless it is `ignored`.
void check_range(const at::Tensor& tokens, std::int64_t vocabulary,
                 std::optional<std::int64_t> ignored, const char* what) {
  at::Tensor bad = tokens.lt(0).logical_or(tokens.ge(vocabulary));
  if (ignored) bad = bad.logical_and(tokens.ne(*ignored));
  if (!bad.any().item<bool>()) return;
  throw Error(ErrorKind::kFormat,
              concat(what, tokens.masked_select(bad)[0].item<std::int64_t>(), ", expected 0 to ",
                     vocabulary - 1, ignored ? concat(" or ", *ignored) : ""));
}

/// Rows at a time: their fp32 copies stay in the cache.
std::int64_t rows_at_once(std::int64_t columns) {
  constexpr std::int64_t kElements = std::int64_t{1} << 18;
  return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, columns));
}

/// Of each row of logits [rows, columns]: the largest, the sum of exponentials relative to it, and
/// the target's logit, 0 where another rank has it. [3, rows] in `inside`.
at::Tensor summarize(const at::Tensor& logits, const OwnTokens& targets, at::ScalarType inside) {
  const std::int64_t rows = logits.size(0);
  const at::Tensor result = at::empty({3, rows}, logits.options().dtype(inside));
  const std::int64_t step = rows_at_once(logits.size(1));
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
    const auto inside = at::promote_types(logits.scalar_type(), at::kFloat);
    const Combined found = combine(summarize(flat, own, inside), options.axis, options.name);
    const at::Tensor kept = targets.ne(kIgnoredLabel);
    const at::Tensor losses = (found.log_sum - found.target).masked_fill(kept.logical_not(), 0);
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
    const std::int64_t step = rows_at_once(columns);
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

}  // namespace

at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    const parallel::Axis& axis,
                                    std::optional<std::int64_t> padding) {
  if (axis.alone()) return nn::embedding(ids, weight, padding);
  const std::int64_t rows = weight.size(0);
  check_range(ids, rows * axis.size, std::nullopt, "embedding: found the token ");
  // Only own tokens are looked up, and only their gradients added.
  const at::Tensor number = ids.reshape({-1}) - axis.rank * rows;
  const at::Tensor places = number.ge(0).logical_and(number.lt(rows)).nonzero().squeeze(1);
  std::optional<std::int64_t> own_padding;
  if (padding && *padding / rows == axis.rank) own_padding = *padding % rows;
  const at::Tensor own = nn::embedding(number.index_select(0, places), weight, own_padding);
  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  return at::zeros({number.numel(), weight.size(1)}, own.options())
      .index_copy_(0, places, own)
      .view(shape);
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

}  // namespace tessera::nn
