#include "tessera/clip.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/record_function.h>

#include <cmath>

#include "base/parallel.h"
#include "base/trace.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Sum of squares in fp64 with a fixed order of additions: blocks, then blocks in order.
template <class T>
double sum_of_squares(const T* data, std::int64_t count) {
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
          const auto value = static_cast<double>(data[i + lane]);
          lanes[lane] += value * value;
        }
      }
      for (int lane = 0; i < end; ++i, ++lane) {
        const auto value = static_cast<double>(data[i]);
        lanes[lane] += value * value;
      }
      double sum = 0.0;
      for (const auto lane : lanes) sum += lane;
      partial[static_cast<std::size_t>(begin / kBlock)] = sum;
    }
  });
  double sum = 0.0;
  for (const auto block : partial) sum += block;
  return sum;
}

double local_sum_of_squares(const at::Tensor& gradient) {
  const auto flat = gradient.contiguous();
  double sum = 0.0;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, flat.scalar_type(), "sum_of_squares",
      [&] { sum = sum_of_squares(flat.const_data_ptr<scalar_t>(), flat.numel()); });
  return sum;
}

}  // namespace

double gradient_norm(const ShardedBase& model) {
  model.unit()->runtime().sink().require_all_redeemed("gradient norm");
  double sum = 0.0;
  for (const auto& view : model.shards()) {
    if (view.shard.grad().defined()) sum += local_sum_of_squares(view.shard.grad());
  }
  auto& runtime = model.unit()->runtime();
  if (runtime.shard_control() != nullptr) {
    auto total = at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble)).reshape({1});
    comm::all_reduce(*runtime.shard_control(), total, "gradient norm");
    sum = total.item<double>();
  }
  return std::sqrt(sum);
}

double clip_grad_norm(const ShardedBase& model, double max_norm) {
  TESSERA_CHECK(!std::isnan(max_norm), ErrorKind::kUsage,
                "clip_grad_norm: found max_norm NaN, expected a number; 0 only measures");
  RECORD_USER_SCOPE("tessera::optimizer");
  const TraceScope traced(TraceRow::kOptimizer, "norm and clip");
  const at::NoGradGuard no_grad;
  const auto norm = gradient_norm(model);
  const auto scale = max_norm / (norm + 1e-6);
  if (max_norm <= 0 || !std::isfinite(norm) || scale >= 1.0) return norm;
  for (const auto& view : model.shards()) {
    if (view.shard.grad().defined()) view.shard.grad().mul_(scale);
  }
  return norm;
}

std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most) {
  const auto views = model.shards();
  std::string mine(views.size(), 0);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto& value = views[i].shard;
    const auto bad = [](const at::Tensor& tensor) {
      return tensor.is_floating_point() && !at::isfinite(tensor).all().item<bool>();
    };
    if (bad(value.detach()) || (value.grad().defined() && bad(value.grad()))) mine[i] = 1;
  }
  auto* group = model.unit()->runtime().data_group();
  if (group != nullptr) {
    for (const auto& other :
         comm::all_gather_fixed(*group, mine, "parameters that are not finite")) {
      for (std::size_t i = 0; i < mine.size(); ++i)
        mine[i] = static_cast<char>(mine[i] | other.at(i));
    }
  }
  std::vector<std::string> names;
  for (std::size_t i = 0; i < mine.size() && names.size() < most; ++i) {
    if (mine[i] != 0) names.push_back(views[i].contract->name);
  }
  return names;
}

}  // namespace tessera
