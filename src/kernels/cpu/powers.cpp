// What a norm of gradients adds, in fp64 with a fixed order of additions: blocks, then blocks in
// order.
#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
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

}  // namespace tessera::kernels::cpu
