#include "train/expert_balance.h"

#include <ATen/ATen.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <string>

#include "comm/group.h"
#include "comm/host_read.h"
#include "models/expert_bias.h"
#include "moe/routing.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/step.h"

namespace tessera::train {
namespace {

void require_experts(bool met, const char* key, double found) {
  TESSERA_CHECK(met, ErrorKind::kConfig, key, ": found ", found,
                " for a model without experts, expected 0");
}

/// That of the module which has the buffer.
std::optional<std::int64_t> layer_of(const std::string& buffer,
                                     const models::ModelDescription& model) {
  const std::string module = buffer.substr(0, buffer.rfind('.') + 1);
  for (const models::ParameterSpec& row : model.parameters) {
    if (row.name.starts_with(module)) return row.layer;
  }
  return std::nullopt;
}

}  // namespace

double aux_loss_coef(const std::optional<double>& asked, const models::ModelSpec& spec) {
  if (!asked)
    return spec.moe && spec.moe->output_router_logits ? spec.moe->router_aux_loss_coef : 0;
  require_experts(*asked == 0 || !models::routed_experts(spec).layers.empty(),
                  "model.aux_loss_coef", *asked);
  return *asked;
}

models::RouterLoad pool(const std::vector<models::RouterLoad>& loads) {
  if (loads.empty()) return {};
  models::RouterLoad all = loads.front();
  for (std::size_t i = 1; i < loads.size(); ++i) {
    all.counts = all.counts + loads[i].counts;
    all.probabilities = all.probabilities + loads[i].probabilities;
  }
  return all;
}

namespace {

/// Whole numbers have one sum in any order: the order of the tensors' group, for which the host
/// does not wait.
at::Tensor added_on_device(const ShardedBase& model, const at::Tensor& counts) {
  const at::Tensor sum = counts.to(at::kLong, /*non_blocking=*/false, /*copy=*/true);
  World& world = *model.mesh().world();
  const auto ranks = model.mesh().shapes().stage_of(world.rank());
  if (ranks.size() > 1) {
    comm::Batch batch;
    batch.label = {comm::Kind::kAllReduce, "experts of the auxiliary loss"};
    batch.ops.emplace_back(comm::AllReduce{sum});
    world.group(ranks, "router loads")->issue(std::move(batch))->wait();
  }
  return sum.to(at::kDouble);
}

}  // namespace

at::Tensor chosen_by_all(const ShardedBase& model, const at::Tensor& counts) {
  if (!counts.is_cpu()) return added_on_device(model, counts);
  const at::Tensor mine = counts.to(at::kDouble).contiguous();
  const auto* begin = mine.const_data_ptr<double>();
  return at::tensor(sum_over_ranks(model, RankSum::kRouterLoad, {begin, begin + mine.numel()}),
                    at::kDouble);
}

at::Tensor auxiliary_addend(const at::Tensor& probabilities, const at::Tensor& chosen,
                            std::int64_t experts_per_token) {
  const auto experts = static_cast<double>(chosen.numel());
  // Rows of the pooled layers: every token of every layer chose as many experts. A micro-batch
  // without a token on any rank has no loss.
  const at::Tensor rows = chosen.sum() / static_cast<double>(experts_per_token);
  const at::Tensor factor =
      at::full_like(rows, experts).div(rows * rows).masked_fill(rows <= 0, 0.0);
  const at::Tensor share = chosen * factor;
  return (probabilities * share.to(probabilities.options())).sum();
}

at::Tensor auxiliary_loss(const ShardedBase& model, const std::vector<models::RouterLoad>& loads,
                          std::int64_t experts_per_token) {
  const models::RouterLoad all = pool(loads);
  return auxiliary_addend(all.probabilities, chosen_by_all(model, all.counts), experts_per_token);
}

void ChosenExperts::add(const std::vector<models::RouterLoad>& loads) {
  counts_.resize(loads.size());
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const at::Tensor counts = loads[i].counts.to(at::kDouble);
    counts_[i] = counts_[i].defined() ? counts_[i] + counts : counts;
  }
}

at::Tensor ChosenExperts::all() const { return counts_.empty() ? at::Tensor() : at::cat(counts_); }

std::vector<std::vector<double>> ChosenExperts::by_layer(const at::Tensor& read) const {
  std::vector<std::vector<double>> layers;
  if (counts_.empty()) return layers;
  const auto* next = read.const_data_ptr<double>();
  for (const at::Tensor& layer : counts_) {
    layers.emplace_back(next, next + layer.numel());
    next += layer.numel();
  }
  return layers;
}

std::vector<models::BufferSpec> expert_biases_of(const ModelSource& source, double coefficient) {
  if (coefficient == 0) {
    if (!source.folder) return {};
    return stored_expert_biases(*source.folder, source.spec);
  }
  require_experts(!models::routed_experts(source.spec).layers.empty(), "model.load_balance_coeff",
                  coefficient);
  TESSERA_CHECK(!source.lora, ErrorKind::kConfig, "model.load_balance_coeff: found ", coefficient,
                " where only adapters are trained, whose checkpoints do not hold the bias, "
                "expected 0");
  return models::expert_biases(source.spec);
}

void balance_experts(const ShardedBase& model, const ModelSource& source,
                     const std::vector<std::vector<double>>& chosen, double coefficient) {
  const at::NoGradGuard no_grad;
  const auto routed = models::routed_experts(source.spec).layers;
  TESSERA_INVARIANT(routed.size() == chosen.size(), "counts of ", chosen.size(), " layers of ",
                    routed.size());
  for (BufferView& view : model.buffers()) {
    if (!models::HasExpertBias::is_name(view.contract->name)) continue;
    const std::string& name = view.contract->name;
    const auto layer = std::ranges::find(routed, layer_of(name, source.description));
    TESSERA_INVARIANT(layer != routed.end(), name, " of a layer without counts");
    const auto& of_layer = chosen[static_cast<std::size_t>(layer - routed.begin())];
    const at::Tensor counts =
        comm::uploaded(at::tensor(of_layer, at::kDouble), view.tensor.device());
    view.tensor.copy_(moe::balanced_bias(view.tensor, counts, coefficient));
  }
}

}  // namespace tessera::train
