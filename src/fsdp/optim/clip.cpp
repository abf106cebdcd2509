#include "tessera/clip.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "base/hash.h"
#include "base/test_hooks.h"
#include "base/trace.h"
#include "comm/host_read.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Whether this rank adds the parameter: of ranks with the same gradient (I), and of stages that
/// hold copies, the first one does.
/// What is cut, or shared out by the data axes, is another part on every rank.
bool counts(const ShardView& view, const Mesh& mesh) {
  const auto& copies = view.contract->reductions.copies;
  if (!copies.empty() && mesh.coordinate(axis::kPipeline) != copies.front()) return false;
  const auto& axes = view.contract->layout.axes;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].parameter.kind == PlacementKind::kInvariant && view.coordinates[i] != 0) {
      return false;
    }
  }
  return true;
}

/// A parameter's sum, as the stages of a pipeline tell each other.
struct SumOfParameter {
  std::int64_t place = 0;  ///< ShardView::place_in_model
  double sum = 0.0;
};

/// Of |value|^p over the elements of each gradient that this rank adds, in fp64; kernels.h says what
/// `largest` is for. They are read from the device together.
std::vector<SumOfParameter> sums_of_parameters(const ShardedBase& model, double p, double largest) {
  std::vector<SumOfParameter> sums;
  std::vector<at::Tensor> gradients;
  for (const auto& view : model.shards()) {
    if (!view.shard.grad().defined() || !counts(view, model.mesh())) continue;
    sums.push_back({view.place_in_model});
    gradients.push_back(view.shard.grad());
  }
  if (sums.empty()) return sums;
  const auto size = std::ssize(gradients);
  const auto found = at::zeros({size}, gradients.front().options().dtype(at::kDouble));
  for (std::int64_t i = 0; i < size; ++i) {
    kernels::add_powers(gradients[static_cast<std::size_t>(i)], p, largest, found.narrow(0, i, 1));
  }
  const at::Tensor here = comm::read_on_host(found, "gradient norm");
  const auto* next = here.const_data_ptr<double>();
  for (auto& one : sums) one.sum = *next++;
  return sums;
}

/// With those of the other stages of a pipeline, in the model's order: the additions of a rank that
/// has all stages.
std::vector<SumOfParameter> sums_of_stages(comm::Group& stages,
                                           const std::vector<SumOfParameter>& mine) {
  const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                          mine.size() * sizeof(SumOfParameter));
  std::vector<SumOfParameter> all;
  for (const auto& of_rank : comm::all_gather_bytes(stages, bytes, "gradient norm over stages")) {
    const auto begin = all.size();
    all.resize(begin + of_rank.size() / sizeof(SumOfParameter));
    std::memcpy(all.data() + begin, of_rank.data(), of_rank.size());
  }
  // Without places they stay in the order of the stages' ranks.
  std::ranges::stable_sort(all, {}, &SumOfParameter::place);
  return all;
}

/// Of |value|^p over all elements of all gradients. Added parameter by parameter, then in rank
/// order. Replicas hold the same gradients: only the ranks of one add.
double sum_of_powers(const ShardedBase& model, double p, double largest = 1.0) {
  auto of_parameters = sums_of_parameters(model, p, largest);
  auto* stages = model.stages_group();
  if (const auto* hook = test_hooks::stages_of_norm.get()) stages = (*hook)(stages);
  if (stages != nullptr) of_parameters = sums_of_stages(*stages, of_parameters);
  double mine = 0.0;
  for (const auto& one : of_parameters) mine += one.sum;
  const auto sum = at::full({1}, mine, at::kDouble);
  auto* group = fsdp::unit_of_handle(model.unit()).runtime().groups().replica_control();
  if (group != nullptr) comm::all_reduce(*group, sum, "gradient norm");
  return sum.item<double>();
}

/// The larger one; NaN where either is.
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

/// A parameter that a check names.
struct Named {
  std::int64_t place = 0;  ///< ShardView::place_in_model
  std::string name;
};

/// Those that this stage has found, with those of the other stages of a pipeline, in the order of
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

/// Of the bytes of the gradient's sum on this rank's shard.
std::uint64_t hash_of(const fsdp::Parameter& parameter) {
  const auto& bucket = parameter.unit->bucket_of(parameter);
  const auto owned = parameter.owned();
  if (!bucket.trainable() || !bucket.has_sum() || owned.empty()) return 0;
  const auto sum =
      bucket.accumulator()
          .narrow(0, bucket.plan().offset_in_slice(parameter.placed(), bucket.rank()), owned.size())
          .contiguous();
  return hash_bytes({static_cast<const char*>(sum.const_data_ptr()), sum.nbytes()});
}

/// Of this stage.
std::vector<Named> differing_gradients(fsdp::Runtime& runtime) {
  std::vector<const fsdp::Parameter*> parameters;
  for (const auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters()) {
      if (!invariant_axes(parameter->contract.layout).empty())
        parameters.push_back(parameter.get());
    }
  }
  if (parameters.empty()) return {};
  std::vector<std::uint64_t> mine;
  for (const auto* parameter : parameters) mine.push_back(hash_of(*parameter));
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
