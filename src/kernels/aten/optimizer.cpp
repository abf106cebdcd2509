// Sums over ranks, gradients and what optimizers do with them.
#include <ATen/ops/where.h>

#include <cmath>

#include "kernels/implementations.h"

namespace tessera::kernels::aten {
namespace {

/// fp32 rounded to odd: what is rounded from there to a dtype of at most 22 bits is as if rounded
/// from `value` (fp64) at once.
at::Tensor to_odd(const at::Tensor& value) {
  const at::Tensor nearest = value.to(at::kFloat);
  const at::Tensor back = nearest.to(at::kDouble);
  const at::Tensor bits = nearest.view(at::kInt);
  const at::Tensor towards_zero = at::where(back.abs() > value.abs(), bits - 1, bits);
  const at::Tensor odd = towards_zero.bitwise_or(1).view(at::kFloat);
  return at::where((back == value).logical_or(value.isnan()), nearest, odd);
}

struct Halves {
  at::Tensor rounded, remainder;  ///< int16: the bfloat16's bits, and what is missing
};

/// base/split_float.h on whole tensors.
Halves split_bits(const at::Tensor& values) {
  const at::Tensor bits = values.view(at::kInt);
  const at::Tensor is_nan = values.isnan();
  const at::Tensor rounded =
      (bits.masked_fill(is_nan, 0) + 0x8000).bitwise_right_shift(16).to(at::kShort);
  const at::Tensor nan = (bits < 0).to(at::kShort) * -0x8000 + 0x7FC0;
  return {at::where(is_nan, nan, rounded), bits.to(at::kShort).masked_fill(is_nan, 0)};
}

}  // namespace

void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds) {
  at::Tensor sum = addends[0].to(result.scalar_type());
  for (std::size_t rank = 1; rank < addends.size(); ++rank) sum = sum + addends[rank];
  adds ? result.add_(sum) : result.copy_(sum);
}

void add_into(const at::Tensor& result, const at::Tensor& addend) { result.add_(addend); }

void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor) {
  if (factor == 1.0 && sum.scalar_type() != at::kDouble) {
    result.copy_(sum);
    return;
  }
  // Not by a number of the host: devices multiply by its rounded reciprocal then.
  const at::Tensor wide = sum.to(at::kDouble);
  const at::Tensor quotient = wide / at::full({}, factor, wide.options());
  const bool narrow = result.element_size() < 4;
  result.copy_(narrow ? to_odd(quotient) : quotient);
}

void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum) {
  const at::Tensor wide = values.to(at::kDouble);
  if (p == 1.0) {
    sum.add_(wide.abs().sum());
  } else if (p == 2.0) {
    sum.add_((wide * wide).sum());
  } else {
    sum.add_((wide.abs() / largest).pow(p).sum());
  }
}

void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values) {
  const at::Tensor high = shard.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  values.view(at::kInt).copy_(high + remainder.to(at::kInt));
}

void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder) {
  const auto [rounded, rest] = split_bits(values);
  shard.view(at::kShort).copy_(rounded);
  remainder.copy_(rest);
}

void round_half_away(const at::Tensor& values, const at::Tensor& shard) {
  shard.view(at::kShort).copy_(split_bits(values).rounded);
}

void take_over_changes(const at::Tensor& shard, const at::Tensor& master) {
  const at::Tensor value = shard.to(at::kFloat);
  master.copy_(at::where(master.to(at::kHalf).to(at::kFloat) == value, master, value));
}

void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const double step = steps[i].item<double>();
    const at::Tensor& parameter = parameters[i];
    const at::Tensor grad = grads[i].to(first[i].scalar_type());
    if (weight_decay != 0.0) parameter.mul_(1.0 - lr * weight_decay);
    first[i].lerp_(grad, 1.0 - beta1);
    second[i].mul_(beta2).addcmul_(grad, grad, 1.0 - beta2);
    const at::Tensor root = second[i].sqrt().div_(std::sqrt(1.0 - std::pow(beta2, step)));
    parameter.addcdiv_(first[i], root.add_(eps), -lr / (1.0 - std::pow(beta1, step)));
  }
}

}  // namespace tessera::kernels::aten
