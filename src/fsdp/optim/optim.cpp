// The common part of all optimizers: which shards they update, when, and their state in
// checkpoints.
#include "tessera/optim.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "fsdp/optim/optimizer_inside.h"
#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/optimizer_shards.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/resolve_steps.h"
#include "grad/ruled_update.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool matches_any(const std::vector<std::string>& patterns, const GradContract& contract) {
  return std::ranges::any_of(patterns,
                             [&](const auto& pattern) { return grad::matches(pattern, contract); });
}

std::uint32_t version_of_shard(const at::Tensor& shard) {
  return static_cast<std::uint32_t>(shard._version());
}

/// Refers to the optimizer's learning rate, so that setting either one sets both.
class SharedLr : public torch::optim::OptimizerOptions {
 public:
  explicit SharedLr(Optimizer& optimizer) : optimizer_(&optimizer) {}
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<SharedLr>(*this);
  }
  double get_lr() const override { return optimizer_->lr(); }
  void set_lr(const double lr) override { optimizer_->set_lr(lr); }

 private:
  Optimizer* optimizer_;
};

/// Refuses added groups: torch::optim::Optimizer::add_param_group is not virtual, so that their
/// parameters would never be updated.
void require_no_group(const torch::optim::Optimizer* for_schedulers) {
  if (for_schedulers == nullptr) return;
  const auto& groups = for_schedulers->param_groups();
  std::size_t parameters = 0;
  for (const auto& group : groups) parameters += group.params().size();
  TESSERA_CHECK(groups.size() == 1 && parameters == 0, ErrorKind::kUsage, "optimizer step: found ",
                groups.size(), " parameter group(s) with ", parameters,
                " parameter(s), by add_param_group() or param_groups(), expected the one without: "
                "it steps the parameters of the handle that it was made for, with one set of "
                "options; make an optimizer for each inner handle, name patterns in no_decay, or "
                "give groups of handle.parameters() to one of torch::optim");
}

class ForSchedulers : public torch::optim::Optimizer {
 public:
  explicit ForSchedulers(tessera::Optimizer& optimizer)
      : torch::optim::Optimizer(std::vector<at::Tensor>(), std::make_unique<SharedLr>(optimizer)),
        optimizer_(optimizer) {}
  at::Tensor step(LossClosure closure) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode with_grad(true);
      loss = closure();
    }
    optimizer_.step();
    return loss;
  }

 private:
  tessera::Optimizer& optimizer_;
};

}  // namespace

Optimizer::Inside::Inside(const Optimizer& optimizer, const ShardedBase& model, double lr,
                          const std::vector<std::string>& no_decay,
                          const std::vector<OptimizerRule>& rules)
    : optimizer_(optimizer), lr_(lr), unit_(model.unit()), no_decay_(no_decay), rules_(rules) {
  layout_ = fsdp::unit_of_handle(unit_).runtime().layout();
  std::vector<const GradContract*> contracts;
  const fsdp::ModelNames names(model);
  for (const auto& view : model.shards()) {
    const auto scoped =
        scope_.emplace(view.contract, Scoped{view.owner, names.named(*view.contract)});
    contracts.push_back(&scoped.first->second.named);
    if (view.contract->trainable) items_.push_back(make_item(view));
  }
  grad::check_no_decay(no_decay, contracts);
  grad::check_optimizer_rules(rules, contracts);
}

fsdp::OptimizerItem Optimizer::Inside::make_item(const ShardView& view) const {
  Item item;
  item.view = view;
  const auto& named = scope_.at(view.contract).named;
  item.decays = view.contract->decays.value_or(true) && !matches_any(no_decay_, named);
  const auto ruled = grad::ruled_update(rules_, named);
  item.lr_scale = ruled.lr_scale;
  item.weight_decay = ruled.weight_decay;
  return item;
}

fsdp::OptimizerItem& Optimizer::Inside::find(std::string_view parameter) {
  const auto found = std::find_if(items_.begin(), items_.end(), [&](const auto& item) {
    return item.view.contract->name == parameter;
  });
  TESSERA_CHECK(found != items_.end(), ErrorKind::kUsage,
                "optimizer: found no trainable parameter ", parameter, " among its ",
                items_.size());
  return *found;
}

void Optimizer::Inside::make_state(Item& item) const {
  if (item.has_state) return;
  item.has_state = true;
  item.master = fsdp::MasterOfShard::make(item.view);
  item.seen_version = version_of_shard(item.view.shard);
  const auto& shard = item.view.shard;
  const auto options =
      shard.options().dtype(to_scalar_type(item.view.contract->state)).requires_grad(false);
  item.state.resize(optimizer_.states_of(*item.view.contract).size());
  for (auto& kept : item.state) kept = at::zeros(shard.sizes(), options);
}

std::vector<OptimizerState::Kept> Optimizer::Inside::kept_of(const Item& item) const {
  if (!item.has_state) return {};
  const auto named = optimizer_.states_of(*item.view.contract);
  std::vector<OptimizerState::Kept> kept;
  for (std::size_t i = 0; i < named.size(); ++i) kept.push_back({named[i].name, item.state[i]});
  if (item.master.defined()) {
    kept.push_back({fsdp::MasterOfShard::name(item.view.contract->master), item.master});
  }
  return kept;
}

fsdp::Runtime& Optimizer::Inside::runtime() const { return unit_->runtime(); }

fsdp::Rates Optimizer::Inside::rates_of(const Item& item, double weight_decay) const {
  return {lr_ * item.lr_scale, item.weight_decay.value_or(item.decays ? weight_decay : 0.0)};
}

bool Optimizer::Inside::was_changed(const Item& item) {
  return was_changed(item, version_of_shard(item.view.shard));
}

bool Optimizer::Inside::was_changed(const Item& item, std::uint32_t version) {
  const bool changed = version != item.seen_version;
  if (changed && item.view.contract->master == Master::kRemainder && !warned_) {
    warned_ = true;
    log::warn("optimizer: parameter ", item.view.contract->name,
              " was written since its last step: it continues from the bfloat16 values that were "
              "written, without the extra bits of their master; where that happens at every step, "
              "store it in "
              "float32");
  }
  return changed;
}

std::vector<fsdp::OptimizerItem*> Optimizer::Inside::items_to_step() {
  TESSERA_CHECK(!runtime().has_failed(), ErrorKind::kUsage,
                "optimizer step: found a step that an exception has ended, expected one whose "
                "backwards are done; run its micro-batches again");
  require_no_group(for_schedulers_.get());
  runtime().require_idle("optimizer step");
  TESSERA_CHECK(layout_ == runtime().layout(), ErrorKind::kUsage,
                "optimizer step: found that set_trainable() has re-bucketed the model without "
                "this optimizer, expected it among those that follow; name it there");
  runtime().require_synced("optimizer step");
  runtime().require_none_lost("optimizer step");
  std::vector<Item*> items;
  for (auto& item : items_) {
    const auto& grad = item.view.shard.grad();
    if (!grad.defined()) continue;  // no rank used it
    fsdp::require_gradient_here(grad, item.view.shard, item.view.contract->name);
    const auto dtype = item.view.shard.scalar_type();
    const auto wanted = to_scalar_type(item.view.contract->state);
    TESSERA_CHECK(grad.scalar_type() == dtype || grad.scalar_type() == wanted, ErrorKind::kContract,
                  "optimizer step: gradient of ", item.view.contract->name, ": found ",
                  c10::toString(grad.scalar_type()), ", expected the shard's ",
                  c10::toString(dtype), wanted != dtype ? " or Float" : "",
                  "; set final_dtype to the storage dtype");
    // mutable_grad() accepts any tensor, and the update reads its memory.
    TESSERA_CHECK(grad.sizes() == item.view.shard.sizes() && grad.is_contiguous(),
                  ErrorKind::kContract, "optimizer step: gradient of ", item.view.contract->name,
                  ": found the shape ", grad.sizes(), " with strides ", grad.strides(),
                  ", expected ", item.view.shard.sizes(), " as its shard, and contiguous");
    make_state(item);
    items.push_back(&item);
  }
  return items;
}

Optimizer::Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay,
                     const std::vector<OptimizerRule>& rules)
    : inside_(std::make_unique<Inside>(*this, model, lr, no_decay, rules)) {}

Optimizer::~Optimizer() = default;

Optimizer::operator torch::optim::Optimizer&() {
  auto& made = inside_->for_schedulers_;
  if (!made) made = std::make_shared<ForSchedulers>(*this);
  return *made;
}

std::vector<OptimizerState> Optimizer::state() const {
  std::vector<OptimizerState> states;
  for (const auto& item : inside_->items_) {
    if (!item.view.contract->trainable) continue;
    states.push_back({item.view, item.steps, inside_->kept_of(item)});
  }
  return states;
}

void Optimizer::set_steps(std::string_view parameter, std::int64_t steps) {
  TESSERA_CHECK(steps >= 0 && steps <= kMostSteps, ErrorKind::kUsage, "optimizer: found ", steps,
                " steps of ", parameter, ", expected 0 to ", kMostSteps);
  inside_->find(parameter).steps = steps;
}

std::vector<OptimizerState::Kept> Optimizer::make_kept(std::string_view parameter) {
  const at::NoGradGuard no_grad;
  auto& item = inside_->find(parameter);
  inside_->make_state(item);
  item.seen_version = version_of_shard(item.view.shard);
  return inside_->kept_of(item);
}

void Optimizer::forget(std::string_view parameter) {
  auto& item = inside_->find(parameter);
  item.state.clear();
  item.master = at::Tensor();
  item.has_state = false;
  item.steps = 0;
}

std::map<std::string, DType> Optimizer::kept_dtypes(const GradContract& contract) const {
  std::map<std::string, DType> dtypes;
  for (auto& state : states_of(contract)) dtypes.emplace(std::move(state.name), contract.state);
  if (const auto master = fsdp::MasterOfShard::dtype(contract.master)) {
    dtypes.emplace(fsdp::MasterOfShard::name(contract.master), *master);
  }
  return dtypes;
}

std::vector<std::string> Optimizer::kept_names() const {
  std::vector<std::string> names;
  for (auto& state : states()) names.push_back(std::move(state.name));
  for (const auto kind : {Master::kRemainder, Master::kCopy}) {
    const bool kept = std::ranges::any_of(
        inside_->items_, [&](const auto& item) { return item.view.contract->master == kind; });
    if (kept) names.emplace_back(fsdp::MasterOfShard::name(kind));
  }
  return names;
}

void Optimizer::set_lr(double lr) {
  fsdp::check_option("lr", lr);
  inside_->lr_ = lr;
}

double Optimizer::lr() const { return inside_->lr_; }

void Optimizer::step() {
  RECORD_USER_SCOPE("tessera::optimizer");
  const TraceScope traced(TraceRow::kOptimizer, "update");
  const at::NoGradGuard no_grad;
  const auto items = inside_->items_to_step();
  // Counts after the last check, so that a refused step does not count.
  for (auto* item : items) ++item->steps;
  inside_->runtime().order_after_reads();
  update(items);
  for (auto* item : items) {
    // Also where this rank owns no element of it: whether a unit is gathered again must not differ
    // between ranks.
    item->view.shard.unsafeGetTensorImpl()->bump_version();
    item->seen_version = version_of_shard(item->view.shard);
  }
}

namespace fsdp {

std::unique_ptr<Optimizer> make_optimizer(OptimizerName name, const ShardedBase& model, double lr,
                                          const Hyperparameters& values,
                                          const MatrixForms& matrices) {
  auto filled = values;
  filled.weight_decay = values.weight_decay.value_or(default_weight_decay(name));
  filled.momentum = values.momentum.value_or(default_momentum(name));
  std::vector<const GradContract*> contracts;
  const auto shards = model.shards();
  for (const auto& view : shards) contracts.push_back(view.contract);
  filled.rule = grad::rules_for(values.rule, contracts);
  switch (name) {
#define TESSERA_OPTIMIZER(enumerator, source, ...) \
  case OptimizerName::enumerator:                  \
    return build_##source(model, lr, filled, matrices);
#include "fsdp/optim/optimizers.def"
  }
  TESSERA_INVARIANT(false, "an optimizer that is not listed");
}

}  // namespace fsdp
}  // namespace tessera
