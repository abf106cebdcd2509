#include "tessera/optim.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "base/trace.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool matches_any(const std::vector<std::string>& patterns, const GradContract& contract) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) {
    if (matches_name(pattern, contract.name)) return true;
    return std::any_of(contract.aliases.begin(), contract.aliases.end(),
                       [&](const auto& alias) { return matches_name(pattern, alias); });
  });
}

class AdamW : public Optimizer {
 public:
  AdamW(const ShardedBase& model, const AdamWOptions& options)
      : Optimizer(model, options.lr, options.no_decay), options_(options) {}

 protected:
  void update(const std::vector<Item*>& items) override {
    // One fused call for those that decay and one for the rest; it wants one dtype a call.
    for (const bool decays : {true, false}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        std::vector<at::Tensor> parameters, grads, first, second, steps;
        for (auto* item : items) {
          if (item->decays != decays || item->view.shard.scalar_type() != dtype) continue;
          if (item->state.empty()) {
            item->state = {at::zeros_like(item->view.shard), at::zeros_like(item->view.shard),
                           at::zeros({}, at::TensorOptions().dtype(at::kFloat))};
          }
          if (item->view.shard.numel() == 0) continue;
          item->state[2].add_(1);
          parameters.push_back(item->view.shard.detach());
          grads.push_back(item->view.shard.grad());
          first.push_back(item->state[0]);
          second.push_back(item->state[1]);
          steps.push_back(item->state[2]);
        }
        if (parameters.empty()) continue;
        at::_fused_adamw_(parameters, grads, first, second, {}, steps, lr_, options_.beta1,
                          options_.beta2, decays ? options_.weight_decay : 0.0, options_.eps,
                          /*amsgrad=*/false,
                          /*maximize=*/false);
      }
    }
  }

 private:
  AdamWOptions options_;
};

class Sgd : public Optimizer {
 public:
  Sgd(const ShardedBase& model, const SgdOptions& options)
      : Optimizer(model, options.lr, options.no_decay), options_(options) {}

 protected:
  void update(const std::vector<Item*>& items) override {
    for (auto* item : items) {
      auto parameter = item->view.shard.detach();
      auto direction = item->view.shard.grad();
      if (item->decays && options_.weight_decay != 0.0) {
        direction = direction.add(parameter, options_.weight_decay);
      }
      if (options_.momentum != 0.0) {
        if (item->state.empty()) {
          item->state = {direction.clone()};
        } else {
          item->state[0].mul_(options_.momentum).add_(direction);
        }
        direction = item->state[0];
      }
      parameter.add_(direction, -lr_);
    }
  }

 private:
  SgdOptions options_;
};

}  // namespace

Optimizer::Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay)
    : lr_(lr), unit_(model.unit()) {
  for (const auto& view : model.shards()) {
    if (!view.contract->trainable) continue;
    Item item;
    item.view = view;
    item.decays = !matches_any(no_decay, *view.contract);
    items_.push_back(std::move(item));
  }
  for (const auto& pattern : no_decay) {
    const bool any = std::any_of(items_.begin(), items_.end(), [&](const auto& item) {
      return matches_any({pattern}, *item.view.contract);
    });
    TESSERA_CHECK(any, ErrorKind::kConfig, "optimizer.no_decay: found the pattern \"", pattern,
                  "\" that matches no trainable parameter, expected one that does");
  }
}

void Optimizer::step() {
  RECORD_USER_SCOPE("tessera::optimizer");
  const TraceScope traced(TraceRow::kOptimizer, "update");
  const at::NoGradGuard no_grad;
  unit_->runtime().require_idle("optimizer step");
  std::vector<Item*> items;
  for (auto& item : items_) {
    const auto& grad = item.view.shard.grad();
    if (!grad.defined()) continue;  // no rank used it
    TESSERA_CHECK(grad.scalar_type() == item.view.shard.scalar_type(), ErrorKind::kContract,
                  "optimizer step: gradient of ", item.view.contract->name, ": found ",
                  c10::toString(grad.scalar_type()), ", expected the shard's ",
                  c10::toString(item.view.shard.scalar_type()),
                  "; set final_dtype to the storage dtype");
    ++item.steps;
    items.push_back(&item);
  }
  update(items);
}

std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options) {
  return std::make_unique<AdamW>(model, options);
}

std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options) {
  return std::make_unique<Sgd>(model, options);
}

}  // namespace tessera
