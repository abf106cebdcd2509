#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>

#include "kernels/implementations.h"
#include "tessera/error.h"

namespace tessera::kernels::cpu {
namespace {

// A block of partial sums stays in the first-level cache while the addends stream past it.
constexpr std::int64_t kBlock = 1024;

template <class To, class From>
To widen(From value) {
  return static_cast<To>(value);
}

template <class From, class To>
void sum_blocks(const std::vector<const void*>& addends, To* result, std::int64_t numel,
                bool adds) {
  std::array<To, kBlock> partial;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - begin);
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
