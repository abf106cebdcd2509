// Sums over ranks, gradients, and the optimizers' updates.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/split_float.h"
#include "base/threads/parallel.h"
#include "kernels/host_sum.h"
#include "kernels/implementations.h"
#include "tessera/error.h"

namespace tessera::kernels::cpu {
namespace {

// A block of partial sums stays in the first-level cache while the addends stream past it.
constexpr std::int64_t kSumBlock = 1024;

template <class To, class From>
To widen(From value) {
  return static_cast<To>(value);
}

template <class From, class To>
void sum_blocks(const std::vector<const void*>& addends, To* result, std::int64_t numel,
                bool adds) {
  if (adds && addends.size() == 1) {
    const auto* only = static_cast<const From*>(addends.front());
    for (std::int64_t i = 0; i < numel; ++i) {
      result[i] = static_cast<To>(result[i] + widen<To>(only[i]));
    }
    return;
  }
  std::array<To, kSumBlock> partial;
  for (std::int64_t begin = 0; begin < numel; begin += kSumBlock) {
    const std::int64_t count = std::min(kSumBlock, numel - begin);
    const auto* first = static_cast<const From*>(addends.front()) + begin;
    To* const sums = partial.data();
    for (std::int64_t i = 0; i < count; ++i) sums[i] = widen<To>(first[i]);
    for (std::size_t rank = 1; rank < addends.size(); ++rank) {
      const auto* next = static_cast<const From*>(addends[rank]) + begin;
      for (std::int64_t i = 0; i < count; ++i) {
        sums[i] = static_cast<To>(sums[i] + widen<To>(next[i]));
      }
    }
    To* const out = result + begin;
    if (adds) {
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<To>(out[i] + sums[i]);
    } else {
      std::copy_n(sums, count, out);
    }
  }
}

template <class From, class To>
void sum_as(const std::vector<const void*>& addends, const HostSum& result) {
  sum_blocks<From>(addends, static_cast<To*>(result.data), result.numel, result.adds);
}

using Kernel = void (*)(const std::vector<const void*>&, const HostSum&);

struct SumKernel {
  at::ScalarType from;
  at::ScalarType to;
  Kernel kernel;
};

constexpr std::array kKernels = {
    SumKernel{at::kFloat, at::kFloat, &sum_as<float, float>},
    SumKernel{at::kBFloat16, at::kFloat, &sum_as<c10::BFloat16, float>},
    SumKernel{at::kHalf, at::kFloat, &sum_as<c10::Half, float>},
    SumKernel{at::kDouble, at::kDouble, &sum_as<double, double>},
    SumKernel{at::kFloat, at::kDouble, &sum_as<float, double>},
    SumKernel{at::kBFloat16, at::kDouble, &sum_as<c10::BFloat16, double>},
    SumKernel{at::kHalf, at::kDouble, &sum_as<c10::Half, double>},
    SumKernel{at::kBFloat16, at::kBFloat16, &sum_as<c10::BFloat16, c10::BFloat16>},
    SumKernel{at::kHalf, at::kHalf, &sum_as<c10::Half, c10::Half>},
    SumKernel{at::kLong, at::kLong, &sum_as<std::int64_t, std::int64_t>},
    SumKernel{at::kInt, at::kInt, &sum_as<std::int32_t, std::int32_t>},
    SumKernel{at::kInt, at::kLong, &sum_as<std::int32_t, std::int64_t>},
    SumKernel{at::kByte, at::kByte, &sum_as<std::uint8_t, std::uint8_t>},
    SumKernel{at::kByte, at::kLong, &sum_as<std::uint8_t, std::int64_t>},
};

Kernel find_kernel(at::ScalarType from, at::ScalarType to) {
  for (const SumKernel& one : kKernels) {
    if (one.from == from && one.to == to) return one.kernel;
  }
  return nullptr;
}

}  // namespace

void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds) {
  std::vector<const void*> pointers;
  pointers.reserve(addends.size());
  for (const at::Tensor& addend : addends) pointers.push_back(addend.const_data_ptr());
  sum_host_memory(pointers, addends.empty() ? result.scalar_type() : addends[0].scalar_type(),
                  {result.mutable_data_ptr(), result.scalar_type(), result.numel(), adds});
}

void add_into(const at::Tensor& result, const at::Tensor& addend) {
  constexpr std::int64_t kGrain = 1 << 15;
  const Kernel kernel = find_kernel(addend.scalar_type(), result.scalar_type());
  const bool is_narrower = addend.element_size() < result.element_size();
  if (kernel == nullptr || !is_narrower || !addend.is_contiguous()) {
    result.add_(addend);
    return;
  }
  const auto* from = static_cast<const std::byte*>(addend.const_data_ptr());
  auto* to = static_cast<std::byte*>(result.mutable_data_ptr());
  base::for_ranges(result.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    const auto at = [&](const at::Tensor& tensor) { return begin * tensor.element_size(); };
    kernel({from + at(addend)}, {to + at(result), result.scalar_type(), end - begin, true});
  });
}

namespace {

/// Rounds to odd in fp32: a further rounding to a dtype of at most 22 bits gives the same bits as
/// one rounding of `value`.
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

namespace {

struct Square {
  double operator()(double value) const { return value * value; }
};
struct Absolute {
  double operator()(double value) const { return std::abs(value); }
};
struct Power {
  double p;
  double largest;
  double operator()(double value) const { return std::pow(std::abs(value) / largest, p); }
};

// Sums a norm's terms, in fp64 with a fixed order of additions: within blocks, then blocks in
// order.
template <class T, class F>
double sum_of(const T* data, std::int64_t count, const F& f) {
  constexpr std::int64_t kBlock = 1 << 16;
  constexpr int kLanes = 8;
  const auto blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks), 0.0);
  base::for_ranges(count, kBlock, [&](std::int64_t first, std::int64_t last) {
    for (auto begin = first; begin < last; begin += kBlock) {
      double lanes[kLanes] = {};
      const auto end = std::min(begin + kBlock, last);
      auto i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          lanes[lane] += f(static_cast<double>(data[i + lane]));
        }
      }
      for (int lane = 0; i < end; ++i, ++lane) lanes[lane] += f(static_cast<double>(data[i]));
      double sum = 0.0;
      for (const auto lane : lanes) sum += lane;
      partial[static_cast<std::size_t>(begin / kBlock)] = sum;
    }
  });
  double sum = 0.0;
  for (const auto block : partial) sum += block;
  return sum;
}

template <class T>
double sum_of_powers(const at::Tensor& flat, double p, double largest) {
  const auto* data = flat.const_data_ptr<T>();
  if (p == 1.0) return sum_of(data, flat.numel(), Absolute{});
  if (p == 2.0) return sum_of(data, flat.numel(), Square{});
  return sum_of(data, flat.numel(), Power{p, largest});
}

}  // namespace

void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum) {
  const at::Tensor flat = values.contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, flat.scalar_type(), "add_powers", [&] {
    *sum.mutable_data_ptr<double>() += sum_of_powers<scalar_t>(flat, p, largest);
  });
}

namespace {

constexpr std::int64_t kMasterGrain = 1 << 15;

// c10::BFloat16 is its bits.
std::uint16_t bits(c10::BFloat16 value) { return value.x; }
c10::BFloat16 bfloat16(std::uint16_t bits) { return {bits, c10::BFloat16::from_bits()}; }

}  // namespace

void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values) {
  const auto* high = shard.const_data_ptr<c10::BFloat16>();
  const auto* low = remainder.const_data_ptr<std::int16_t>();
  auto* whole = values.mutable_data_ptr<float>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) whole[i] = join({bits(high[i]), low[i]});
  });
}

void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder) {
  const auto* whole = values.const_data_ptr<float>();
  auto* high = shard.mutable_data_ptr<c10::BFloat16>();
  auto* low = remainder.mutable_data_ptr<std::int16_t>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto halves = split(whole[i]);
      high[i] = bfloat16(halves.rounded);
      low[i] = halves.remainder;
    }
  });
}

void round_half_away(const at::Tensor& values, const at::Tensor& shard) {
  const auto* whole = values.const_data_ptr<float>();
  auto* high = shard.mutable_data_ptr<c10::BFloat16>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) high[i] = bfloat16(split(whole[i]).rounded);
  });
}

void take_over_changes(const at::Tensor& shard, const at::Tensor& master) {
  const auto* stored = shard.const_data_ptr<c10::Half>();
  auto* full = master.mutable_data_ptr<float>();
  base::for_ranges(shard.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto value = static_cast<float>(stored[i]);
      full[i] = static_cast<float>(static_cast<c10::Half>(full[i])) == value ? full[i] : value;
    }
  });
}

// As PyTorch's fused kernel: one pass over all that an update reads and writes.
void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps) {
  at::_fused_adamw_(parameters, grads, first, second, /*max_exp_avg_sqs=*/{}, steps, lr, beta1,
                    beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::kernels::cpu

namespace tessera::kernels {

void sum_host_memory(const std::vector<const void*>& addends, at::ScalarType from,
                     const HostSum& result) {
  TESSERA_INVARIANT(!addends.empty(), "a sum of nothing");
  const cpu::Kernel kernel = cpu::find_kernel(from, result.dtype);
  TESSERA_INVARIANT(kernel != nullptr, "cannot add ", c10::toString(from), " into ",
                    c10::toString(result.dtype));
  if (result.numel > 0) kernel(addends, result);
}

bool can_sum(at::ScalarType from, at::ScalarType to) {
  return cpu::find_kernel(from, to) != nullptr;
}

}  // namespace tessera::kernels
