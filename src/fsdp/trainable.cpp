// set_trainable, step by step: what changes, whether all ranks mean the same, then unit by unit the
// new layout and what moves.
#include "tessera/trainable.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "fsdp/relayout.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/finite_copy.h"
#include "grad/resolve_rules.h"
#include "grad/resolve_steps.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

/// A parameter and what it becomes.
struct Changed {
  fsdp::Parameter* parameter;
  GradContract contract;
};

std::vector<PrecisionRule> rules_of(const std::vector<TrainableChange>& changes) {
  std::vector<PrecisionRule> rules;
  for (const auto& change : changes) {
    TESSERA_CHECK(
        !change.match.empty(), ErrorKind::kContract,
        "set_trainable: found a change without a pattern to match, expected at least one");
    PrecisionRule rule;
    rule.match = change.match;
    rule.frozen = change.trainable                           ? FrozenRule::kNo
                  : change.frozen_as == FrozenAs::kReplicate ? FrozenRule::kReplicate
                                                             : FrozenRule::kShard;
    rules.push_back(std::move(rule));
  }
  return rules;
}

bool is_asked_for(const GradContract& contract, FrozenRule asked) {
  if (asked == FrozenRule::kNo) return contract.trainable;
  const auto frozen_as = asked == FrozenRule::kReplicate ? FrozenAs::kReplicate : FrozenAs::kShard;
  return !contract.trainable && contract.frozen_as == frozen_as;
}

}  // namespace

void Optimizer::carry_state(const std::vector<fsdp::Relaid>& relaid,
                            std::vector<fsdp::Carried>& carried) {
  for (const auto& moved : relaid) {
    const auto& contract = moved.parameter->contract;
    const auto found = std::find_if(items_.begin(), items_.end(), [&](const auto& item) {
      return item.view.contract == &contract;
    });
    if (found == items_.end()) continue;
    auto& item = *found;
    // Whoever wrote the shard did not write these bits; other ranks must not join them again.
    const bool changed = item.has_state && moved.old_version != item.seen_version;
    if (changed && item.master.defined() && item.master.scalar_type() == at::kShort) {
      item.master.zero_();
    }
    const auto renew = [&](at::Tensor& kept) {
      if (!kept.defined() || kept.dim() != 1) return;  // a number of the whole parameter
      auto next = at::empty({moved.after.size()}, kept.options());
      carried.push_back({&moved, std::exchange(kept, next), next});
    };
    for (auto& kept : item.state) renew(kept);
    renew(item.master);
    item.view.begin = moved.after.begin;
    item.view.end = moved.after.end;
    item.seen_version = static_cast<std::uint32_t>(item.view.shard._version());
  }
}

void Optimizer::follow(const ShardedBase& outermost) {
  std::vector<Item> items;
  for (const auto& view : outermost.shards()) {
    if (scope_.count(view.contract) == 0) continue;
    const auto found = std::find_if(items_.begin(), items_.end(), [&](const auto& item) {
      return item.view.contract == view.contract;
    });
    const auto& contract = *view.contract;
    if (found != items_.end() && !contract.replicated()) {
      items.push_back(std::move(*found));
    } else if (contract.trainable) {
      items.push_back(make_item(view));
    }
  }
  items_ = std::move(items);
  layout_ = unit_->runtime().layout();
}

std::string Optimizer::summary() const {
  const auto with_state =
      std::count_if(items_.begin(), items_.end(), [](const auto& item) { return item.has_state; });
  return concat("optimizer ", name(), ": ", items_.size(), " parameters, ", with_state,
                " with state\n");
}

/// What set_trainable() works on: a model between steps and those who follow it.
class TrainableChanger {
 public:
  TrainableChanger(ShardedBase& model, const std::vector<Optimizer*>& follow)
      : model_(model), runtime_(fsdp::unit_of_handle(model.unit_).runtime()), followers_(follow) {
    runtime_.require_between_steps("set_trainable");
    TESSERA_CHECK(runtime_.units().front() == model.unit_.get(), ErrorKind::kUsage,
                  "set_trainable: found the handle of an inner unit, ", model.unit_->shown_name(),
                  ", expected the outermost one; parameters keep their names there");
    std::set<const Optimizer*> seen;
    for (const auto* optimizer : followers_) {
      TESSERA_CHECK(optimizer != nullptr && seen.insert(optimizer).second &&
                        &optimizer->unit_->runtime() == &runtime_,
                    ErrorKind::kUsage,
                    "set_trainable: found an optimizer that is null, named twice or of another "
                    "model, expected each of this model once");
    }
  }

  /// Errors: kContract; nothing has changed then.
  void resolve(const std::vector<TrainableChange>& changes) {
    const auto rules = rules_of(changes);
    grad::RuleBook book(rules, "set_trainable, change");
    ask(model_, book);
    book.check_all_matched();
    TESSERA_CHECK(std::any_of(now_.begin(), now_.end(), [](const auto& c) { return c.trainable; }),
                  ErrorKind::kContract,
                  "set_trainable: found nothing left to train, expected at least one parameter");
    std::string lines = to_lines(ModelContract{std::move(now_), {}, {}});
    for (const auto* optimizer : followers_) lines += optimizer->summary();
    const auto lost = what_does_not_fit();
    runtime_.agree(lines + lost, "trainable parameters",
                   "make the same changes with the same optimizers on every rank");
    TESSERA_CHECK(lost.empty(), ErrorKind::kContract, "set_trainable: ", lost,
                  "; keep it sharded, or wider by a [[precision.rule]]");
  }

  void move() {
    if (changed_.empty()) return;
    std::vector<fsdp::Unit*> units;
    for (auto& change : changed_) {
      change.parameter->contract = std::move(change.contract);
      auto* unit = change.parameter->unit;
      if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
    }
    // All ranks in one order, whatever the order of handles.
    std::sort(units.begin(), units.end(),
              [](const auto* a, const auto* b) { return a->id() < b->id(); });
    try {
      runtime_.begin_relayout();
      for (auto* unit : units) move(*unit);
      for (auto* optimizer : followers_) optimizer->follow(model_);
      runtime_.agree_on_plan();
    } catch (const std::exception& error) {
      runtime_.fail(error.what());
      throw;
    }
  }

 private:
  void ask(const ShardedBase& handle, grad::RuleBook& book) {
    for (const auto& own : handle.own_) {
      const auto& contract = own.parameter->contract;
      now_.push_back(contract);
      const auto asked = book.ask(contract.name, contract.aliases);
      if (!asked.frozen || is_asked_for(contract, asked.frozen->value)) continue;
      auto next = grad::retrained(contract, *asked.frozen, handle.policy_);
      next.raw_sum_by_autograd =
          next.trainable && own.parameter->leaves.size() <= contract.aliases.size();
      now_.back() = next;
      changed_.push_back({own.parameter, std::move(next)});
    }
    for (const auto& inner : handle.inner_) ask(*inner.handle, book);
  }

  /// Of values of this rank that a narrower copy cannot hold; "" for none.
  std::string what_does_not_fit() const {
    for (const auto& [parameter, next] : changed_) {
      const auto compute = next.compute.dtype;
      if (!next.replicated() || represents(compute, next.storage.dtype)) continue;
      try {
        const auto shard = parameter->shard.detach();
        const auto copy = at::empty(shard.sizes(), shard.options().dtype(to_scalar_type(compute)));
        grad::finite_copy(copy, shard, "parameter " + next.name);
      } catch (const Error& error) {
        return error.what();
      }
    }
    return "";
  }

  void move(fsdp::Unit& unit) {
    const auto relaid = fsdp::lay_out_anew(unit);
    std::vector<fsdp::Carried> carried;
    for (const auto& moved : relaid) {
      carried.push_back({&moved, moved.old_shard, moved.parameter->shard.variable_data()});
    }
    for (auto* optimizer : followers_) optimizer->carry_state(relaid, carried);
    fsdp::carry(runtime_, unit, carried);
    unit.add({});  // the sink knows each slot by its contract
  }

  ShardedBase& model_;
  fsdp::Runtime& runtime_;
  const std::vector<Optimizer*>& followers_;
  std::vector<Changed> changed_;
  std::vector<GradContract> now_;  // of all parameters
};

void set_trainable(ShardedBase& model, const std::vector<TrainableChange>& changes,
                   const std::vector<Optimizer*>& follow) {
  const at::NoGradGuard no_grad;
  TrainableChanger changer(model, follow);
  changer.resolve(changes);
  changer.move();
}

}  // namespace tessera
