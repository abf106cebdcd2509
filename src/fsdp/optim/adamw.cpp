// AdamW over the shards, with as few kernel calls as possible.
#include "fsdp/optim/adamw.h"

#include <ATen/ATen.h>

#include <compare>
#include <map>

#include "fsdp/optim/optimizer_registry.h"
#include "kernels/kernels.h"

namespace tessera {
namespace fsdp {

AdamW::AdamW(const ShardedBase& model, const AdamWOptions& options, double lr_scale)
    : Optimizer(model, options.lr, options.no_decay, options.rules),
      options_(options),
      lr_scale_(lr_scale) {
  check_option("lr", options.lr);
  check_option("beta1", options.beta1, 1);
  check_option("beta2", options.beta2, 1);
  check_option("eps", options.eps);
  check_option("weight_decay", options.weight_decay);
}

std::string AdamW::name() const { return std::string(name_of(OptimizerName::kAdamW)); }

void AdamW::update(const std::vector<Item*>& items) {
  on_device_.clear();
  // Parameters with the same dtype and rates, which one fused call updates.
  struct Alike {
    at::ScalarType dtype;
    Rates rates;
    auto operator<=>(const Alike&) const = default;
  };
  std::map<Alike, Lists> groups;
  for (auto* item : items) {
    const auto& shard = item->view.shard;
    if (item->master.defined()) continue;
    auto& lists = groups[{shard.scalar_type(), inside_->rates_of(*item, options_.weight_decay)}];
    add(lists, *item, {shard.detach(), shard.grad(), {0, shard.numel()}});
  }
  for (auto& [alike, lists] : groups) step_fused(lists, alike.rates);
  for (auto* item : items) {
    if (!item->master.defined()) continue;
    master_.step(item->view, item->master, inside_->was_changed(*item), [&](const Stepped& part) {
      Lists lists;
      add(lists, *item, part);
      step_fused(lists, inside_->rates_of(*item, options_.weight_decay));
    });
  }
}

/// Returns the number of updates as a tensor on the parameter's device. On a device parameters with
/// the same number share one tensor, since setting it is a kernel.
at::Tensor AdamW::steps_of(Item& item, const at::Tensor& parameter) {
  const auto steps = static_cast<double>(item.steps);
  if (!parameter.is_cpu()) {
    auto& shared = on_device_[item.steps];
    if (!shared.defined()) shared = at::full({}, steps, parameter.options().dtype(at::kFloat));
    return shared;
  }
  if (item.state.size() == kSteps) item.state.push_back(at::zeros({}, at::kFloat));
  return item.state[kSteps].fill_(steps);
}

void AdamW::add(Lists& lists, Item& item, const Stepped& part) {
  const auto size = part.elements.size();
  if (size == 0) return;
  lists.parameters.push_back(part.values);
  lists.grads.push_back(part.gradient);
  lists.first.push_back(item.state[kFirst].narrow(0, part.elements.begin, size));
  lists.second.push_back(item.state[kSecond].narrow(0, part.elements.begin, size));
  lists.steps.push_back(steps_of(item, part.values));
}

void AdamW::step_fused(Lists& lists, const Rates& rates) const {
  if (lists.parameters.empty()) return;
  kernels::adamw(lists.parameters, lists.grads, lists.first, lists.second, lists.steps,
                 rates.lr * lr_scale_, options_.beta1, options_.beta2, rates.weight_decay,
                 options_.eps);
}

}  // namespace fsdp

std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options) {
  return std::make_unique<fsdp::AdamW>(model, options);
}

std::unique_ptr<Optimizer> fsdp::build_adamw(const ShardedBase& model, double lr,
                                             const Hyperparameters& values, const MatrixForms&) {
  return make_adamw(model, {lr,
                            values.betas[0],
                            values.betas[1],
                            values.eps,
                            values.weight_decay.value(),
                            {},
                            values.rule});
}

}  // namespace tessera
