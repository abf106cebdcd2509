// set_trainable, step by step: what changes, whether all ranks mean the same, then unit by unit the
// new layout and what moves.
#include "tessera/trainable.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

#include "fsdp/relayout.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "grad/resolve_rules.h"
#include "grad/resolve_steps.h"
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

void require_between_steps(const fsdp::Runtime& runtime) {
  runtime.require_whole_sums("set_trainable");
  for (const auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters()) {
      TESSERA_CHECK(!parameter->shard.grad().defined(), ErrorKind::kUsage,
                    "set_trainable: found a gradient of ", parameter->contract.name,
                    ", expected none between steps; call zero_grad() first");
    }
  }
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
    const auto renew = [&](at::Tensor& kept) {
      if (!kept.defined() || kept.dim() != 1) return;  // a number of the whole parameter
      auto next = at::empty({moved.after.size()}, kept.options());
      carried.push_back({&moved, std::exchange(kept, next), next});
    };
    for (auto& kept : item.state) renew(kept);
    renew(item.master);
    item.view.begin = moved.after.begin;
    item.view.end = moved.after.end;
    // That somebody else has written the shard before is still to be seen.
    const bool changed = moved.old_version != item.seen_version;
    item.seen_version =
        changed ? moved.old_version : static_cast<std::uint32_t>(item.view.shard._version());
  }
}

void Optimizer::follow(const ShardedBase& model) {
  std::vector<Item> items;
  for (const auto& view : model.shards()) {
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

void set_trainable(ShardedBase& model, const std::vector<TrainableChange>& changes,
                   const std::vector<Optimizer*>& follow) {
  const at::NoGradGuard no_grad;
  auto& runtime = fsdp::unit_of_handle(model.unit_).runtime();
  require_between_steps(runtime);
  const auto rules = rules_of(changes);
  grad::RuleBook book(rules);
  std::vector<Changed> changed;
  std::vector<GradContract> now;  // of all parameters
  const std::function<void(const ShardedBase&)> ask = [&](const ShardedBase& handle) {
    for (const auto& own : handle.own_) {
      const auto& contract = own.parameter->contract;
      now.push_back(contract);
      const auto asked = book.ask(contract.name, contract.aliases);
      if (!asked.frozen || is_asked_for(contract, asked.frozen->value)) continue;
      auto next = grad::retrained(contract, *asked.frozen, handle.policy_);
      next.raw_sum_by_autograd =
          next.trainable && own.parameter->leaves.size() <= contract.aliases.size();
      if (const auto& factor = own.parameter->unit->divide_factor; factor && next.trainable) {
        next.reductions.divide_factor = *factor;
      }
      now.back() = next;
      changed.push_back({own.parameter, std::move(next)});
    }
    for (const auto& inner : handle.inner_) ask(*inner.handle);
  };
  ask(model);
  book.check_all_matched();
  TESSERA_CHECK(std::any_of(now.begin(), now.end(), [](const auto& c) { return c.trainable; }),
                ErrorKind::kContract,
                "set_trainable: found nothing left to train, expected at least one parameter");
  runtime.agree(to_lines(ModelContract{std::move(now), {}, {}}), "trainable parameters",
                "make the same changes on every rank");
  if (changed.empty()) return;
  std::vector<fsdp::Unit*> units;
  for (auto& change : changed) {
    change.parameter->contract = std::move(change.contract);
    auto* unit = change.parameter->unit;
    if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
  // All ranks in one order, whatever the order of handles.
  std::sort(units.begin(), units.end(), [](const auto* a, const auto* b) { return a->id < b->id; });
  try {
    runtime.begin_relayout();
    for (auto* unit : units) {
      const auto relaid = fsdp::lay_out_anew(*unit);
      std::vector<fsdp::Carried> carried;
      for (const auto& moved : relaid) {
        carried.push_back({&moved, moved.old_shard, moved.parameter->shard.variable_data()});
      }
      for (auto* optimizer : follow) optimizer->carry_state(relaid, carried);
      fsdp::carry(runtime, *unit, carried);
      unit->add({});  // the sink knows each slot by its contract
    }
    for (auto* optimizer : follow) optimizer->follow(model);
    runtime.agree_on_plan();
  } catch (const std::exception& error) {
    runtime.fail(error.what());
    throw;
  }
}

}  // namespace tessera
