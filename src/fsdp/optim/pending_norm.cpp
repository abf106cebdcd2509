#include "fsdp/optim/pending_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Whether this rank adds the parameter. Of ranks with the same gradient (Invariant), and of stages
/// that hold copies, the first one does. A parameter that is cut, by a model axis or over the data
/// axes, is another part on every rank.
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

/// A parameter's sum, as the stages of a pipeline exchange it.
struct SumOfParameter {
  std::int64_t place = 0;  ///< ShardView::place_in_model
  double sum = 0.0;
};

/// Returns the sums of all stages of a pipeline, stage by stage.
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
  return all;
}

}  // namespace

PendingNorm::PendingNorm(const ShardedBase& model, double p, double largest) : model_(model) {
  const at::NoGradGuard no_grad;
  const auto& runtime = unit_of_handle(model.unit()).runtime();
  runtime.require_synced("gradient norm");
  runtime.require_none_lost("gradient norm");
  std::vector<at::Tensor> gradients;
  for (const auto& view : model.shards()) {
    const auto& gradient = view.shard.grad();
    if (!gradient.defined() || gradient.numel() == 0 || !counts(view, model.mesh())) continue;
    require_gradient_here(gradient, view.shard, view.contract->name);
    places_.push_back(view.place_in_model);
    gradients.push_back(gradient);
  }
  if (!gradients.empty()) sums_ = kernels::sums_of_powers(gradients, p, largest);
}

double PendingNorm::sum(const at::Tensor& read) const {
  std::vector<SumOfParameter> sums;
  const auto* next = places_.empty() ? nullptr : read.const_data_ptr<double>();
  for (const auto place : places_) sums.push_back({place, *next++});
  auto* stages = model_.stages_group();
  if (const auto* hook = test_hooks::stages_of_norm.get()) stages = (*hook)(stages);
  // Replicas hold the same gradients, so that only the ranks of one replica add.
  if (stages != nullptr) sums = sums_of_stages(*stages, sums);
  // Sorts by the model's order, however units and stages hold the parameters. Without places they
  // stay in the order of the shards, and of the stages' ranks.
  std::ranges::stable_sort(sums, {}, &SumOfParameter::place);
  double mine = 0.0;
  for (const auto& one : sums) mine += one.sum;
  auto* group = unit_of_handle(model_.unit()).runtime().groups().replica_control();
  if (const auto* hook = test_hooks::sum_of_norm.get()) return (*hook)(mine, group);
  const auto sum = at::full({1}, mine, at::kDouble);
  if (group != nullptr) comm::all_reduce(*group, sum, "gradient norm");
  return sum.item<double>();
}

}  // namespace tessera::fsdp
