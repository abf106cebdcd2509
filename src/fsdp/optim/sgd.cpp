// SGD with momentum, as PyTorch's.
#include <ATen/ATen.h>

#include "fsdp/optim/optimizer_inside.h"
#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/optimizer_shards.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

class Sgd : public Optimizer {
  using Item = fsdp::OptimizerItem;

 public:
  Sgd(const ShardedBase& model, const SgdOptions& options)
      : Optimizer(model, options.lr, options.no_decay, options.rules), options_(options) {}
  std::string name() const override {
    return std::string(fsdp::name_of(fsdp::OptimizerName::kSgd));
  }
  /// Where a run sets a momentum later, the buffer starts as the next gradient, as in PyTorch.
  std::vector<KeptTensor> states() const override {
    if (options_.momentum == 0.0) return {};
    return {{"momentum_buffer", KeptTensor::Begins::kLater}};
  }

 protected:
  void update(const std::vector<Item*>& items) override {
    for (auto* item : items) {
      master_.step(item->view, item->master, inside_->was_changed(*item),
                   [&](const fsdp::Stepped& part) { step_part(*item, part); });
    }
  }

 private:
  void step_part(Item& item, const fsdp::Stepped& part) const {
    auto direction = part.gradient;
    const auto rates = inside_->rates_of(item, options_.weight_decay);
    if (rates.weight_decay != 0.0) direction = direction.add(part.values, rates.weight_decay);
    if (options_.momentum != 0.0) {
      const auto momentum = item.state[0].narrow(0, part.elements.begin, part.elements.size());
      momentum.mul_(options_.momentum).add_(direction);
      direction = momentum;
    }
    part.values.add_(direction, -rates.lr);
  }

  SgdOptions options_;
  fsdp::MasterOfShard master_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options) {
  fsdp::check_option("lr", options.lr);
  fsdp::check_option("momentum", options.momentum);
  fsdp::check_option("weight_decay", options.weight_decay);
  return std::make_unique<Sgd>(model, options);
}

std::unique_ptr<Optimizer> fsdp::build_sgd(const ShardedBase& model, double lr,
                                           const Hyperparameters& values, const MatrixForms&) {
  return make_sgd(model,
                  {lr, values.momentum.value(), values.weight_decay.value(), {}, values.rule});
}

}  // namespace tessera
