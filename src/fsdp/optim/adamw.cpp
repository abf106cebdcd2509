// AdamW over the shards, as many as one call takes.
#include <ATen/ATen.h>

#include <map>

#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/optimizer_shards.h"
#include "kernels/kernels.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

class AdamW : public Optimizer {
 public:
  AdamW(const ShardedBase& model, const AdamWOptions& options)
      : Optimizer(model, options.lr, options.no_decay, options.rules), options_(options) {}
  std::string name() const override {
    return std::string(fsdp::name_of(fsdp::OptimizerName::kAdamW));
  }
  std::vector<KeptTensor> states() const override { return {{"exp_avg"}, {"exp_avg_sq"}}; }

 protected:
  void update(const std::vector<Item*>& items) override {
    on_device_.clear();
    // One fused call for those that are stepped alike; it wants one dtype a call.
    struct Alike {
      at::ScalarType dtype;
      Rates rates;
      auto operator<=>(const Alike&) const = default;
    };
    std::map<Alike, Lists> groups;
    for (auto* item : items) {
      const auto& shard = item->view.shard;
      if (item->master.defined()) continue;
      auto& lists = groups[{shard.scalar_type(), rates_of(*item, options_.weight_decay)}];
      add(lists, *item, {shard.detach(), shard.grad(), {0, shard.numel()}});
    }
    for (auto& [alike, lists] : groups) step_fused(lists, alike.rates);
    for (auto* item : items) {
      if (!item->master.defined()) continue;
      master_.step(item->view, item->master, was_changed(*item), [&](const fsdp::Stepped& part) {
        Lists lists;
        add(lists, *item, part);
        step_fused(lists, rates_of(*item, options_.weight_decay));
      });
    }
  }

 private:
  enum State : std::size_t { kFirst, kSecond, kSteps };  // as states(), and what the kernel counts
  struct Lists {
    std::vector<at::Tensor> parameters, grads, first, second, steps;
  };

  /// Where the parameter is. On a device all that have made as many share one: it is a kernel to set.
  at::Tensor steps_of(Item& item, const at::Tensor& parameter) {
    const auto steps = static_cast<double>(item.steps);
    if (!parameter.is_cpu()) {
      auto& shared = on_device_[item.steps];
      if (!shared.defined()) shared = at::full({}, steps, parameter.options().dtype(at::kFloat));
      return shared;
    }
    if (item.state.size() == kSteps) item.state.push_back(at::zeros({}, at::kFloat));
    return item.state[kSteps].fill_(steps);
  }

  void add(Lists& lists, Item& item, const fsdp::Stepped& part) {
    const auto size = part.elements.size();
    if (size == 0) return;
    lists.parameters.push_back(part.values);
    lists.grads.push_back(part.gradient);
    lists.first.push_back(item.state[kFirst].narrow(0, part.elements.begin, size));
    lists.second.push_back(item.state[kSecond].narrow(0, part.elements.begin, size));
    lists.steps.push_back(steps_of(item, part.values));
  }

  void step_fused(Lists& lists, const Rates& rates) const {
    if (lists.parameters.empty()) return;
    kernels::adamw(lists.parameters, lists.grads, lists.first, lists.second, lists.steps, rates.lr,
                   options_.beta1, options_.beta2, rates.weight_decay, options_.eps);
  }

  AdamWOptions options_;
  std::map<std::int64_t, at::Tensor> on_device_;  // by number, of the update under way
  fsdp::MasterOfShard master_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options) {
  fsdp::check_option("lr", options.lr);
  fsdp::check_option("beta1", options.beta1, 1);
  fsdp::check_option("beta2", options.beta2, 1);
  fsdp::check_option("eps", options.eps);
  fsdp::check_option("weight_decay", options.weight_decay);
  return std::make_unique<AdamW>(model, options);
}

std::unique_ptr<Optimizer> fsdp::build_adamw(const ShardedBase& model, double lr,
                                             const Hyperparameters& values) {
  return make_adamw(model, {lr,
                            values.betas[0],
                            values.betas[1],
                            values.eps,
                            values.weight_decay.value(),
                            {},
                            values.rule});
}

}  // namespace tessera
