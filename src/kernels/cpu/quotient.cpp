#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <bit>
#include <cmath>

#include "base/parallel.h"
#include "kernels/implementations.h"
#include "tessera/error.h"

namespace tessera::kernels::cpu {
namespace {

/// fp32 rounded to odd: what is rounded from there to a dtype of at most 22 bits is as if rounded
/// from `value` at once.
float to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  if (back == value || std::isnan(value)) return nearest;
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const auto towards_zero = std::abs(back) > std::abs(value) ? bits - 1 : bits;
  return std::bit_cast<float>(towards_zero | 1U);
}

template <class To>
To rounded(double value) {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else {
    return static_cast<To>(to_odd(value));
  }
}

template <class From, class To>
void divide(const From* sum, To* result, std::int64_t numel, double factor) {
  constexpr std::int64_t kGrain = 1 << 15;
  base::for_ranges(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      result[i] = rounded<To>(static_cast<double>(sum[i]) / factor);
    }
  });
}

template <class From>
void divide_from(const From* sum, const at::Tensor& result, double factor) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, result.scalar_type(), "divide_into",
      [&] { divide(sum, result.mutable_data_ptr<scalar_t>(), result.numel(), factor); });
}

/// Whether ATen's vectorized division rounds nothing but the quotient.
bool divides_alike(at::ScalarType dtype, double factor) {
  return dtype == at::kDouble || (dtype == at::kFloat && static_cast<float>(factor) == factor);
}

}  // namespace

void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor) {
  TESSERA_INVARIANT(result.sizes() == sum.sizes() && result.is_contiguous() && sum.is_contiguous(),
                    "a quotient of another shape");
  const auto from = sum.scalar_type();
  if (factor == 1.0 && from != at::kDouble) {
    result.copy_(sum);
  } else if (from == result.scalar_type() && divides_alike(from, factor)) {
    auto out = result;
    at::div_out(out, sum, at::scalar_tensor(factor, sum.options()));
  } else {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, from, "divide_into", [&] {
      divide_from(sum.const_data_ptr<scalar_t>(), result, factor);
    });
  }
}

}  // namespace tessera::kernels::cpu
