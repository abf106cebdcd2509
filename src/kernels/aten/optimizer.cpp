// Sums over ranks, gradients, and the optimizers' updates.
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/test_hooks.h"
#include "kernels/implementations.h"

namespace tessera::kernels::aten {
namespace {

/// The limit of elements for temporaries of whole buckets (64 MiB in fp64), which are made in
/// chunks: a bucket of a layer has hundreds of millions of elements, and each copy of it in fp64 is
/// twice its size.
constexpr std::int64_t kElementsAtATime = std::int64_t{1} << 23;

struct Block {
  std::int64_t begin = 0, numel = 0;
  at::Tensor of(const at::Tensor& contiguous) const {
    return contiguous.view({-1}).narrow(0, begin, numel);
  }
};

template <class Body>
void in_blocks(std::int64_t numel, const Body& body) {
  const auto of_test = test_hooks::elements_at_a_time.get();
  const std::int64_t step = of_test ? (*of_test)() : kElementsAtATime;
  for (std::int64_t begin = 0; begin < numel; begin += step) {
    body(Block{begin, std::min(step, numel - begin)});
  }
}

/// Rounds to odd in fp32: a further rounding to a dtype of at most 22 bits gives the same bits as
/// one rounding of `value` (fp64).
at::Tensor to_odd(const at::Tensor& value) {
  const at::Tensor nearest = value.to(at::kFloat);
  const at::Tensor back = nearest.to(at::kDouble);
  const at::Tensor bits = nearest.view(at::kInt);
  const at::Tensor towards_zero = at::where(back.abs() > value.abs(), bits - 1, bits);
  const at::Tensor odd = towards_zero.bitwise_or(1).view(at::kFloat);
  return at::where((back == value).logical_or(value.isnan()), nearest, odd);
}

struct Halves {
  at::Tensor rounded, remainder;  ///< int16: the bfloat16's bits, and the remaining bits
};

/// Applies base/split_float.h to whole tensors.
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
  in_blocks(result.numel(), [&](const Block& block) {
    at::Tensor sum = block.of(addends[0]).to(result.scalar_type());
    // The first sum has memory of its own: an addend may be the result, or must not change.
    if (addends.size() > 1) sum = sum + block.of(addends[1]);
    for (std::size_t rank = 2; rank < addends.size(); ++rank) sum.add_(block.of(addends[rank]));
    const at::Tensor part = block.of(result);
    adds ? part.add_(sum) : part.copy_(sum);
  });
}

void add_into(const at::Tensor& result, const at::Tensor& addend) { result.add_(addend); }

void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor) {
  if (factor == 1.0 && sum.scalar_type() != at::kDouble) {
    result.copy_(sum);
    return;
  }
  // Divides by a tensor and not by a number of the host: devices multiply by its rounded
  // reciprocal.
  const auto dtype = sum.scalar_type();
  if (dtype == result.scalar_type() && divides_alike(dtype, factor)) {
    at::Tensor out = result;
    at::div_out(out, sum, at::full({}, factor, sum.options()));
    return;
  }
  const at::Tensor divisor = at::full({}, factor, sum.options().dtype(at::kDouble));
  const bool narrow = result.element_size() < 4;
  in_blocks(result.numel(), [&](const Block& block) {
    const at::Tensor quotient = block.of(sum).to(at::kDouble) / divisor;
    block.of(result).copy_(narrow ? to_odd(quotient) : quotient);
  });
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
