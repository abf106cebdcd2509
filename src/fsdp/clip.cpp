#include "tessera/clip.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/record_function.h>

#include <cmath>
#include <cstring>

#include "base/parallel.h"
#include "base/trace.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"

namespace tessera {
namespace {

struct Square {
  double operator()(double value) const { return value * value; }
};
struct Absolute {
  double operator()(double value) const { return std::abs(value); }
};
/// Of values that were divided by the largest: no power overflows, whatever p.
struct Power {
  double p;
  double largest;
  double operator()(double value) const { return std::pow(std::abs(value) / largest, p); }
};

/// Sum of f(value) in fp64 with a fixed order of additions: blocks, then blocks in order.
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

/// Whether this rank adds the parameter: of ranks with the same gradient (I) the first one does.
/// What is cut, or shared out by the data axes, is another part on every rank.
bool counts(const ShardView& view) {
  const auto& axes = view.contract->layout.axes;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].parameter.kind == PlacementKind::kInvariant && view.coordinates[i] != 0) {
      return false;
    }
  }
  return true;
}

/// Over this rank's elements of all gradients.
template <class F>
double local_sum(const ShardedBase& model, const F& f) {
  double sum = 0.0;
  for (const auto& view : model.shards()) {
    if (!view.shard.grad().defined() || !counts(view)) continue;
    const auto flat = view.shard.grad().contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, flat.scalar_type(), "gradient_norm",
        [&] { sum += sum_of(flat.const_data_ptr<scalar_t>(), flat.numel(), f); });
  }
  return sum;
}

/// Added in rank order. Replicas hold the same gradients: only the ranks of one add.
double over_ranks(const ShardedBase& model, double sum) {
  auto* group = fsdp::unit_of_handle(model.unit()).runtime().replica_control();
  if (group == nullptr) return sum;
  auto total = at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble)).reshape({1});
  comm::all_reduce(*group, total, "gradient norm");
  return total.item<double>();
}

/// The larger one; NaN where either is.
double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

double largest_absolute(const ShardedBase& model) {
  double largest = 0.0;
  for (const auto& view : model.shards()) {
    const auto& gradient = view.shard.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    largest = larger(largest, gradient.abs().max().item<double>());
  }
  auto* group = fsdp::unit_of_handle(model.unit()).runtime().replica_control();
  if (group == nullptr) return largest;
  const std::string mine(reinterpret_cast<const char*>(&largest), sizeof(largest));
  for (const auto& bytes : comm::all_gather_fixed(*group, mine, "largest gradient")) {
    double other = 0.0;
    std::memcpy(&other, bytes.data(), sizeof(other));
    largest = larger(largest, other);
  }
  return largest;
}

}  // namespace

double gradient_norm(const ShardedBase& model, double p) {
  TESSERA_CHECK(p > 0, ErrorKind::kUsage, "gradient norm: found p = ", p,
                ", expected a number above 0, infinity included (1, 2, 3)");
  const auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.require_synced("gradient norm");
  runtime.require_none_lost("gradient norm");
  if (std::isinf(p)) return largest_absolute(model);
  if (p == 1.0) return over_ranks(model, local_sum(model, Absolute{}));
  if (p == 2.0) return std::sqrt(over_ranks(model, local_sum(model, Square{})));
  const auto largest = largest_absolute(model);
  if (largest == 0.0 || !std::isfinite(largest)) return largest;
  const auto sum = over_ranks(model, local_sum(model, Power{p, largest}));
  return largest * std::pow(sum, 1.0 / p);
}

double clip_grad_norm(const ShardedBase& model, double max_norm, double p) {
  TESSERA_CHECK(!std::isnan(max_norm), ErrorKind::kUsage,
                "clip_grad_norm: found max_norm NaN, expected a number; 0 only measures");
  RECORD_USER_SCOPE("tessera::optimizer");
  const TraceScope traced(TraceRow::kOptimizer, "norm and clip");
  const at::NoGradGuard no_grad;
  const auto norm = gradient_norm(model, p);
  const auto scale = max_norm / (norm + 1e-6);
  if (max_norm <= 0 || !std::isfinite(norm) || scale >= 1.0) return norm;
  for (const auto& view : model.shards()) {
    if (view.shard.grad().defined()) view.shard.grad().mul_(scale);
  }
  return norm;
}

std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most) {
  const auto views = model.shards();
  std::vector<bool> any(views.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto& value = views[i].shard;
    const auto bad = [](const at::Tensor& tensor) {
      return tensor.is_floating_point() && !at::isfinite(tensor).all().item<bool>();
    };
    if (bad(value.detach()) || (value.grad().defined() && bad(value.grad()))) any[i] = true;
  }
  auto* group = fsdp::unit_of_handle(model.unit()).runtime().data_group();
  if (group != nullptr) any = comm::any_of_ranks(*group, any, "parameters that are not finite");
  std::vector<std::string> names;
  for (std::size_t i = 0; i < any.size() && names.size() < most; ++i) {
    if (any[i]) names.push_back(views[i].contract->name);
  }
  return names;
}

}  // namespace tessera
