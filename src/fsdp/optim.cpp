#include "tessera/optim.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <limits>

#include "base/parallel.h"
#include "base/trace.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "grad/torch_dtype.h"
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

bool is_narrow(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

/// What moments and masters are kept in.
at::ScalarType state_dtype(at::ScalarType shard) { return is_narrow(shard) ? at::kFloat : shard; }

/// Elements of the shard that somebody else has written since the master was rounded into it.
template <class T>
void take_over_changes(const T* shard, float* master, std::int64_t numel) {
  constexpr std::int64_t kGrain = 1 << 15;
  base::for_ranges(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto value = static_cast<float>(shard[i]);
      master[i] = static_cast<float>(static_cast<T>(master[i])) == value ? master[i] : value;
    }
  });
}

class AdamW : public Optimizer {
 public:
  AdamW(const ShardedBase& model, const AdamWOptions& options)
      : Optimizer(model, options.lr, options.no_decay), options_(options) {}
  std::string name() const override { return "AdamW"; }
  std::vector<std::string> kept_names() const override {
    return {"exp_avg", "exp_avg_sq", "master"};
  }

 protected:
  void update(const std::vector<Item*>& items) override {
    // One fused call for those that decay and one for the rest; it wants one dtype a call.
    for (const bool decays : {true, false}) {
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        Lists lists;
        for (auto* item : items) {
          if (item->decays != decays || item->view.shard.scalar_type() != dtype) continue;
          add(lists, *item, item->view.shard.detach(), item->view.shard.grad());
        }
        step_fused(lists, decays);
      }
    }
    for (auto* item : items) {
      if (is_narrow(item->view.shard.scalar_type())) step_narrow(*item);
    }
  }

 private:
  enum State : std::size_t { kFirst, kSecond, kSteps, kMaster };
  struct Lists {
    std::vector<at::Tensor> parameters, grads, first, second, steps;
  };

  void make_state(Item& item) const override {
    if (!item.state.empty()) return;
    const auto& shard = item.view.shard;
    const auto options =
        shard.options().dtype(state_dtype(shard.scalar_type())).requires_grad(false);
    item.state = {at::zeros(shard.sizes(), options), at::zeros(shard.sizes(), options),
                  at::zeros({}, at::TensorOptions().dtype(at::kFloat))};
    if (is_narrow(shard.scalar_type())) item.state.push_back(shard.detach().to(at::kFloat));
  }

  std::vector<OptimizerState::Kept> kept_of(const Item& item) const override {
    if (item.state.empty()) return {};
    std::vector<OptimizerState::Kept> kept{{"exp_avg", item.state[kFirst]},
                                           {"exp_avg_sq", item.state[kSecond]}};
    if (item.state.size() > kMaster) kept.push_back({"master", item.state[kMaster]});
    return kept;
  }

  void add(Lists& lists, Item& item, const at::Tensor& parameter, const at::Tensor& grad) const {
    make_state(item);
    if (parameter.numel() == 0) return;
    item.state[kSteps].fill_(static_cast<double>(item.steps));
    lists.parameters.push_back(parameter);
    lists.grads.push_back(grad);
    lists.first.push_back(item.state[kFirst]);
    lists.second.push_back(item.state[kSecond]);
    lists.steps.push_back(item.state[kSteps]);
  }

  void step_fused(Lists& lists, bool decays) const {
    if (lists.parameters.empty()) return;
    at::_fused_adamw_(lists.parameters, lists.grads, lists.first, lists.second, {}, lists.steps,
                      lr_, options_.beta1, options_.beta2, decays ? options_.weight_decay : 0.0,
                      options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }

  /// The master is stepped, in fp32 throughout, and rounded into the shard.
  void step_narrow(Item& item) {
    make_state(item);
    auto shard = item.view.shard.detach();
    const auto& master = item.state[kMaster];
    if (shard.numel() == 0) return;
    AT_DISPATCH_REDUCED_FLOATING_TYPES(shard.scalar_type(), "adamw", [&] {
      take_over_changes(shard.const_data_ptr<scalar_t>(), master.mutable_data_ptr<float>(),
                        shard.numel());
    });
    auto grad = item.view.shard.grad();
    if (grad.scalar_type() != at::kFloat) {
      if (!widened_.defined() || widened_.numel() < grad.numel()) {
        widened_ = at::empty(grad.sizes(), grad.options().dtype(at::kFloat));
      }
      grad = widened_.narrow(0, 0, grad.numel()).copy_(grad);
    }
    Lists lists;
    add(lists, item, master, grad);
    step_fused(lists, item.decays);
    shard.copy_(master);
  }

  AdamWOptions options_;
  at::Tensor widened_;  // a 16-bit gradient in fp32, one parameter after the other
};

class Sgd : public Optimizer {
 public:
  Sgd(const ShardedBase& model, const SgdOptions& options)
      : Optimizer(model, options.lr, options.no_decay), options_(options) {}
  std::string name() const override { return "SGD"; }
  std::vector<std::string> kept_names() const override {
    if (options_.momentum == 0.0) return {};
    return {"momentum_buffer"};
  }

 protected:
  void make_state(Item& item) const override {
    if (!item.state.empty() || options_.momentum == 0.0) return;
    const auto dtype = to_scalar_type(item.view.contract->final);
    item.state = {at::zeros(item.view.shard.sizes(),
                            item.view.shard.options().dtype(dtype).requires_grad(false))};
  }

  std::vector<OptimizerState::Kept> kept_of(const Item& item) const override {
    if (item.state.empty()) return {};
    return {{"momentum_buffer", item.state[0]}};
  }

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

std::vector<OptimizerState> Optimizer::state() const {
  std::vector<OptimizerState> states;
  for (const auto& item : items_) states.push_back({item.view, item.steps, kept_of(item)});
  return states;
}

Optimizer::Item& Optimizer::find(std::string_view parameter) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const auto& item) {
    return item.view.contract->name == parameter;
  });
  TESSERA_CHECK(found != items_.end(), ErrorKind::kUsage,
                "optimizer: found no trainable parameter ", parameter, " among its ",
                items_.size());
  return *found;
}

void Optimizer::set_steps(std::string_view parameter, std::int64_t steps) {
  find(parameter).steps = steps;
}

std::vector<OptimizerState::Kept> Optimizer::make_kept(std::string_view parameter) {
  const at::NoGradGuard no_grad;
  auto& item = find(parameter);
  make_state(item);
  return kept_of(item);
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
    const auto dtype = item.view.shard.scalar_type();
    TESSERA_CHECK(grad.scalar_type() == dtype || grad.scalar_type() == state_dtype(dtype),
                  ErrorKind::kContract, "optimizer step: gradient of ", item.view.contract->name,
                  ": found ", c10::toString(grad.scalar_type()), ", expected the shard's ",
                  c10::toString(dtype), is_narrow(dtype) ? " or Float" : "",
                  "; set final_dtype to the storage dtype");
    ++item.steps;
    items.push_back(&item);
  }
  update(items);
}

namespace {

/// `highest` itself is outside. Errors: kUsage.
void check_option(const char* name, double value, double lowest, double highest) {
  TESSERA_CHECK(value >= lowest && value < highest, ErrorKind::kUsage, "optimizer: found ", name,
                " ", value, ", expected at least ", lowest, " and below ", highest);
}

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options) {
  check_option("lr", options.lr, 0, kUnbounded);
  check_option("beta1", options.beta1, 0, 1);
  check_option("beta2", options.beta2, 0, 1);
  check_option("eps", options.eps, 0, kUnbounded);
  check_option("weight_decay", options.weight_decay, 0, kUnbounded);
  return std::make_unique<AdamW>(model, options);
}

std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options) {
  check_option("lr", options.lr, 0, kUnbounded);
  check_option("momentum", options.momentum, 0, kUnbounded);
  check_option("weight_decay", options.weight_decay, 0, kUnbounded);
  return std::make_unique<Sgd>(model, options);
}

}  // namespace tessera
