#include "tessera/clip.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "base/hash.h"
#include "base/trace.h"
#include "comm/host_read.h"
#include "fsdp/optim/pending_norm.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Returns the sum of abs(value)^p over all elements of all gradients. `numbers` are read to the
/// host at the same time, all under the label `what`.
double sum_of_powers(const ShardedBase& model, double p, double largest,
                     std::vector<at::Tensor>& numbers, std::string_view what) {
  const fsdp::PendingNorm pending(model, p, largest);
  numbers.push_back(pending.sums());
  numbers = comm::read_on_host(numbers, what);
  const at::Tensor sums = numbers.back();
  numbers.pop_back();
  return pending.sum(sums);
}
double sum_of_powers(const ShardedBase& model, double p, double largest = 1.0) {
  std::vector<at::Tensor> none;
  return sum_of_powers(model, p, largest, none, "gradient norm");
}

/// Returns the larger one; NaN where either is NaN.
double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

double largest_absolute(const ShardedBase& model) {
  std::vector<at::Tensor> of_gradients;
  for (const auto& view : model.shards()) {
    const auto& gradient = view.shard.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    of_gradients.push_back(gradient.abs().max());
  }
  double largest = 0.0;
  for (const auto& one : comm::read_on_host(of_gradients, "largest gradient")) {
    largest = larger(largest, one.item<double>());
  }
  for (auto* group : {fsdp::unit_of_handle(model.unit()).runtime().groups().replica_control(),
                      model.stages_group()}) {
    if (group == nullptr) continue;
    const std::string mine(reinterpret_cast<const char*>(&largest), sizeof(largest));
    for (const auto& bytes : comm::all_gather_fixed(*group, mine, "largest gradient")) {
      double other = 0.0;
      std::memcpy(&other, bytes.data(), sizeof(other));
      largest = larger(largest, other);
    }
  }
  return largest;
}

/// A parameter that a check has found.
struct Named {
  std::int64_t place = 0;  ///< ShardView::place_in_model
  std::string name;
};

/// Returns the names that this stage and the other stages of a pipeline have found, in the order of
/// the model. Collective.
std::vector<std::string> names_of_stages(const ShardedBase& model, std::vector<Named> found) {
  if (auto* stages = model.stages_group(); stages != nullptr) {
    std::string mine;
    for (const auto& one : found) mine += concat(one.place, " ", one.name, "\n");
    found.clear();
    for (const auto& text : comm::all_gather_bytes(*stages, mine, "names over stages")) {
      std::istringstream lines(text);
      for (Named one; lines >> one.place >> one.name;) found.push_back(one);
    }
    std::ranges::stable_sort(found, {}, &Named::place);
  }
  std::vector<std::string> names;
  for (const auto& one : found) names.push_back(one.name);
  return names;
}

}  // namespace

double gradient_norm(const ShardedBase& model, double p) {
  TESSERA_CHECK(p > 0, ErrorKind::kUsage, "gradient norm: found p = ", p,
                ", expected a number above 0, infinity included (1, 2, 3)");
  const auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.require_synced("gradient norm");
  runtime.require_none_lost("gradient norm");
  if (std::isinf(p)) return largest_absolute(model);
  if (p == 1.0) return sum_of_powers(model, p);
  if (p == 2.0) return std::sqrt(sum_of_powers(model, p));
  const auto largest = largest_absolute(model);
  if (largest == 0.0 || !std::isfinite(largest)) return largest;
  return largest * std::pow(sum_of_powers(model, p, largest), 1.0 / p);
}

namespace {

void scale_gradients(const ShardedBase& model, double norm, double max_norm) {
  const auto factor = max_norm / (norm + 1e-6);
  if (max_norm <= 0 || !std::isfinite(norm) || factor >= 1.0) return;
  std::vector<at::Tensor> gradients;
  for (const auto& view : model.shards()) {
    if (view.shard.grad().defined()) gradients.push_back(view.shard.grad());
  }
  if (gradients.empty()) return;
  if (!gradients.front().is_cpu()) return at::_foreach_mul_(gradients, factor);
  for (const auto& gradient : gradients) gradient.mul_(factor);
}

/// Clips the gradients to `max_norm` and returns their norm before, which `norm_of()` computes.
template <class NormOf>
double clipped(const ShardedBase& model, double max_norm, const NormOf& norm_of) {
  TESSERA_CHECK(!std::isnan(max_norm), ErrorKind::kUsage,
                "clip_grad_norm: found max_norm NaN, expected a number; 0 only measures");
  RECORD_USER_SCOPE("tessera::optimizer");
  const TraceScope traced(TraceRow::kOptimizer, "norm and clip");
  const at::NoGradGuard no_grad;
  const double norm = norm_of();
  scale_gradients(model, norm, max_norm);
  return norm;
}

}  // namespace

double clip_grad_norm(const ShardedBase& model, double max_norm, double p) {
  return clipped(model, max_norm, [&] { return gradient_norm(model, p); });
}

double fsdp::clip_and_read(const ShardedBase& model, double max_norm,
                           std::vector<at::Tensor>& numbers) {
  return clipped(model, max_norm, [&] {
    return std::sqrt(sum_of_powers(model, 2.0, 1.0, numbers, "numbers of a step"));
  });
}

std::vector<std::string> nonfinite_parameters(const ShardedBase& model, std::size_t most) {
  const auto views = model.shards();
  std::vector<at::Tensor> fine;
  std::vector<std::size_t> of_view;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto& value = views[i].shard;
    for (const auto& tensor : {value.detach(), value.grad()}) {
      if (!tensor.defined() || !tensor.is_floating_point()) continue;
      fine.push_back(at::isfinite(tensor).all());
      of_view.push_back(i);
    }
  }
  std::vector<bool> any(views.size());
  const auto read = comm::read_on_host(fine, "parameters that are not finite");
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (!read[i].item<bool>()) any[of_view[i]] = true;
  }
  auto* group = fsdp::unit_of_handle(model.unit()).runtime().data_group();
  if (group != nullptr) any = comm::any_of_ranks(*group, any, "parameters that are not finite");
  std::vector<Named> found;
  for (std::size_t i = 0; i < any.size() && found.size() < most; ++i) {
    if (any[i]) found.push_back({views[i].place_in_model, views[i].contract->name});
  }
  auto names = names_of_stages(model, std::move(found));
  names.resize(std::min(names.size(), most));
  return names;
}

namespace {

std::vector<std::string_view> invariant_axes(const ParameterLayout& layout) {
  std::vector<std::string_view> axes;
  for (const auto& axis : layout.axes) {
    if (axis.parameter.kind == PlacementKind::kInvariant) axes.push_back(axis.axis);
  }
  return axes;
}

/// Returns the gradient's sum on this rank's shard; undefined where there is none.
at::Tensor sum_of(const fsdp::Parameter& parameter) {
  const auto& bucket = parameter.unit->bucket_of(parameter);
  const auto owned = parameter.owned();
  if (!bucket.trainable() || !bucket.has_sum() || owned.empty()) return {};
  return bucket.accumulator().narrow(
      0, bucket.plan().offset_in_slice(parameter.placed(), bucket.rank()), owned.size());
}

/// Returns the hash of the bytes of each sum; 0 where there is none.
std::vector<std::uint64_t> hashes_of(const std::vector<at::Tensor>& sums) {
  std::vector<std::uint64_t> hashes;
  for (const auto& sum : comm::read_on_host(sums, "invariant gradients")) {
    hashes.push_back(
        sum.defined() ? hash_bytes({static_cast<const char*>(sum.const_data_ptr()), sum.nbytes()})
                      : 0);
  }
  return hashes;
}

/// Returns the parameters of this stage whose gradients differ between ranks.
std::vector<Named> differing_gradients(fsdp::Runtime& runtime) {
  std::vector<const fsdp::Parameter*> parameters;
  for (const auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters()) {
      if (!invariant_axes(parameter->contract.layout).empty())
        parameters.push_back(parameter.get());
    }
  }
  if (parameters.empty()) return {};
  std::vector<at::Tensor> sums;
  for (const auto* parameter : parameters) sums.push_back(sum_of(*parameter));
  const std::vector<std::uint64_t> mine = hashes_of(sums);
  const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                          mine.size() * sizeof(std::uint64_t));
  const auto all = comm::all_gather_fixed(*runtime.data_group(), bytes, "invariant gradients");
  const auto& shapes = runtime.mesh().shapes();
  const auto stage = shapes.stage_of(runtime.world().rank());
  const auto hash_on = [&](int rank, std::size_t parameter) {
    const auto at = std::find(stage.begin(), stage.end(), rank) - stage.begin();
    std::uint64_t hash = 0;
    std::memcpy(&hash, all.at(static_cast<std::size_t>(at)).data() + parameter * sizeof hash,
                sizeof hash);
    return hash;
  };
  std::vector<Named> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& layout = parameters[i]->contract.layout;
    const bool same = std::all_of(stage.begin(), stage.end(), [&](int rank) {
      const auto alike = shapes.of(layout.mesh).group_of(rank, invariant_axes(layout));
      return hash_on(rank, i) == hash_on(alike.front(), i);
    });
    if (!same) found.push_back({parameters[i]->place_in_model, parameters[i]->contract.name});
  }
  return found;
}

}  // namespace

std::vector<std::string> check_invariant_gradients(const ShardedBase& model) {
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.require_reduced("invariant gradients");
  return names_of_stages(model, differing_gradients(runtime));
}

}  // namespace tessera
