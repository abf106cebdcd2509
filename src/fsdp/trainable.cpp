// set_trainable, step by step: resolves the changes, checks that all ranks make the same ones, then
// lays out unit by unit and moves the values.
#include "tessera/trainable.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "fsdp/optim/optimizer_inside.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/contract_key.h"
#include "grad/finite_copy.h"
#include "grad/resolve_rules.h"
#include "grad/resolve_steps.h"
#include "grad/torch_dtype.h"
#include "layout/range.h"
#include "tessera/error.h"

namespace tessera::fsdp {

// Relayout puts a unit's parameters into the buckets of their changed contracts, and moves their
// bytes there. First every rank lays the unit out again, without communication. Then the ranges
// that were on other ranks are sent in one batch among the ranks of a shard group; replicas do the
// same among themselves. The two plans, which all ranks know, decide what is sent.

/// A parameter whose elements have moved.
struct Rebucketed {
  Parameter* parameter = nullptr;
  AxesGroups on;                    ///< the groups of the ranks that share it
  std::vector<layout::Move> moves;  ///< between these ranks
  layout::Range before, after;      ///< this rank's elements before and now
  std::uint32_t old_version = 0;    ///< version of the shard before; it has another one now
  at::Tensor old_shard;             ///< [before]; the new one is parameter->shard, [after], zeros
};

/// Values to move, one for each element of a rebucketed parameter.
struct Carried {
  const Rebucketed* parameter = nullptr;
  at::Tensor from;  ///< [before]
  at::Tensor to;    ///< [after]; may have another dtype
};

namespace {

/// Returns the range of a parameter that each rank of `on` holds.
std::vector<layout::Range> holdings(const layout::BucketPlan& plan, const layout::Placed& placed,
                                    const AxesGroups& on) {
  std::vector<layout::Range> held;
  for (int rank = 0; rank < on.ranks; ++rank) {
    held.push_back(plan.owned(placed, plan.ranks == 1 ? 0 : rank));
  }
  return held;
}

Rebucketed rebucketed(Unit& unit, Parameter& parameter, const layout::BucketPlan& plan,
                      const layout::Placed& placed) {
  // Also for parameters that are whole on every rank now: they may be sharded later.
  const auto on = unit.runtime().groups().of({.reductions = parameter.contract.reductions});
  const auto before = holdings(unit.bucket_of(parameter).plan(), parameter.placed(), on);
  const auto after = holdings(plan, placed, on);
  const auto self = static_cast<std::size_t>(on.rank);
  return {.parameter = &parameter,
          .on = on,
          .moves = layout::plan_moves(before, after),
          .before = before[self],
          .after = after[self],
          .old_version = static_cast<std::uint32_t>(parameter.shard._version()),
          .old_shard = parameter.shard.variable_data()};
}

/// Makes the parameter's tensors show its place in `bucket`.
void show(Parameter& parameter, const Bucket& bucket, const layout::Placed& placed) {
  const bool trainable = parameter.contract.trainable;
  // Without requires_grad the data may change its dtype.
  parameter.shard.set_requires_grad(false);
  parameter.shard.set_data(bucket.shard_of(placed));
  parameter.shard.unsafeGetTensorImpl()->bump_version();
  parameter.shard.set_requires_grad(trainable);
  parameter.used = parameter.published = false;
  parameter.seen_grad = at::Tensor();
  for (auto& leaf : parameter.leaves) {
    grad::set_trainable(*leaf, false);
    leaf->tensor.set_data(bucket.unsharded().view(placed.offset, leaf->tensor.sizes()));
    if (trainable) grad::set_trainable(*leaf, true);
  }
}

/// Gives the unit the buckets that its parameters' contracts name now. The unit must be sharded and
/// without gradients under way.
std::vector<Rebucketed> rebucket(Unit& unit) {
  std::vector<layout::PlanItem> items;
  for (const auto& parameter : unit.parameters()) items.push_back(plan_item(parameter->contract));
  const auto options = unit.runtime().plan_options();
  const auto plan = layout::plan_unit(unit.name(), items, options);
  layout::validate(plan, items, options);
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<Rebucketed> moved;
  for (const auto& planned : plan.buckets) {
    const auto& bucket = buckets.emplace_back(unit.make_bucket(planned));
    bucket->set_number(buckets.size() - 1);
    for (std::size_t place = 0; place < planned.parameters.size(); ++place) {
      const auto& placed = planned.parameters[place];
      auto& parameter = *unit.parameters()[placed.parameter];
      moved.push_back(rebucketed(unit, parameter, planned, placed));
      parameter.bucket = buckets.size() - 1;
      parameter.place = place;
      show(parameter, *bucket, placed);
    }
  }
  unit.buckets() = std::move(buckets);
  unit.add({});  // the sink knows each slot by its bucket and its contract
  return moved;
}

at::Tensor narrowed(const at::Tensor& values, const layout::Range& held,
                    const layout::Range& wanted) {
  return values.narrow(0, wanted.begin - held.begin, wanted.size());
}

void put(const Carried& one, const layout::Range& range, const at::Tensor& values) {
  grad::finite_copy(narrowed(one.to, one.parameter->after, range), values,
                    "parameter " + one.parameter->parameter->contract.name);
}

/// The all-to-all of one tensor, as bytes, since NCCL has no integers of 16 bits. The constructor
/// copies the ranges that stay on this rank.
struct Exchange {
  explicit Exchange(const Carried& carried) : one(carried) {
    const auto& [parameter, on, moves, before, after, version, shard] = *one.parameter;
    op.sends.resize(static_cast<std::size_t>(on.ranks));
    op.receives.resize(op.sends.size());
    std::vector<at::Tensor> sent{one.from.narrow(0, 0, 0)};
    std::int64_t bytes = 0;
    for (const auto& move : moves) {
      const auto size = move.range.size() * static_cast<std::int64_t>(one.from.element_size());
      const auto from_here =
          move.from == on.rank ? narrowed(one.from, before, move.range) : at::Tensor();
      if (move.from == on.rank && move.to == on.rank) {
        put(one, move.range, from_here);
      } else if (move.from == on.rank) {
        sent.push_back(from_here);
        op.sends[static_cast<std::size_t>(move.to)] += size;
      } else if (move.to == on.rank) {
        received.push_back(move);
        op.receives[static_cast<std::size_t>(move.from)] += size;
        bytes += size;
      }
    }
    std::ranges::stable_sort(received, {}, &layout::Move::from);
    op.input = at::cat(sent).view(at::kByte);
    op.output = at::empty({bytes}, op.input.options());
  }
  /// Copies the received ranges to their places. The all-to-all must have ended.
  void put_received() const {
    const auto values = op.output.view(one.from.scalar_type());
    std::int64_t begin = 0;
    for (const auto& move : received) {
      put(one, move.range, values.narrow(0, begin, move.range.size()));
      begin += move.range.size();
    }
  }

  const Carried& one;
  comm::AllToAll op;
  std::vector<layout::Move> received;
};

/// Fills every `to`. Collective over the shard groups. Errors: kComm.
void carry(Runtime& runtime, const Unit& unit, const std::vector<Carried>& all) {
  std::vector<Exchange> exchanges;
  std::vector<std::pair<comm::Group*, comm::Batch>> batches;  // in the plan's order
  const comm::Label label{comm::Kind::kAllToAll, unit.shown_name() + " (laid out again)", unit.id(),
                          0, runtime.model_name()};
  for (const auto& one : all) {
    exchanges.emplace_back(one);
    auto* const group = one.parameter->on.groups.gather;
    if (group == nullptr) continue;
    auto batch = std::ranges::find(batches, group, [](const auto& each) { return each.first; });
    if (batch == batches.end()) batch = batches.insert(batches.end(), {group, {label, {}}});
    batch->second.ops.emplace_back(exchanges.back().op);
  }
  for (auto& [group, batch] : batches) runtime.queue().submit(*group, std::move(batch)).wait();
  for (const auto& exchange : exchanges) exchange.put_received();
}

}  // namespace
}  // namespace tessera::fsdp

namespace tessera {
namespace {

/// A parameter and its new contract.
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

/// Returns the contract of an optimizer's item.
constexpr auto contract_of = [](const auto& item) { return item.view.contract; };

}  // namespace

void Optimizer::Inside::carry_state(const std::vector<fsdp::Rebucketed>& rebucketed,
                                    std::vector<fsdp::Carried>& carried) {
  for (const auto& moved : rebucketed) {
    const auto found = std::ranges::find(items_, &moved.parameter->contract, contract_of);
    if (found == items_.end()) continue;
    auto& item = *found;
    // The remainder of a shard that was written to is invalid; other ranks must not use it either.
    const bool changed = item.has_state && was_changed(item, moved.old_version);
    if (changed && item.master.defined() && item.master.scalar_type() == at::kShort) {
      item.master.zero_();
    }
    const auto renew = [&](at::Tensor& kept) {
      if (!kept.defined() || kept.dim() != 1) return;  // a number for the whole parameter
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

void Optimizer::Inside::follow(const ShardedBase& outermost) {
  std::vector<Item> items;
  for (const auto& view : outermost.shards()) {
    if (scope_.count(view.contract) == 0) continue;
    const auto found = std::ranges::find(items_, view.contract, contract_of);
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

std::string Optimizer::Inside::summary() const {
  const auto with_state = std::ranges::count(items_, true, &Item::has_state);
  return concat("optimizer ", optimizer_.name(), ": ", items_.size(), " parameters, ", with_state,
                " with state\n");
}

/// Changes a model between steps, and the optimizers that follow it.
class TrainableChanger {
 public:
  TrainableChanger(ShardedBase& model, const std::vector<Optimizer*>& follow)
      : model_(model),
        names_(model),
        runtime_(fsdp::unit_of_handle(model.unit_).runtime()),
        followers_(follow) {
    runtime_.require_between_steps("set_trainable");
    TESSERA_CHECK(runtime_.units().front() == model.unit_.get(), ErrorKind::kUsage,
                  "set_trainable: found the handle of an inner unit, ", model.unit_->shown_name(),
                  ", expected the outermost one; parameters keep their names there");
    std::set<const Optimizer*> seen;
    for (const auto* optimizer : followers_) {
      TESSERA_CHECK(optimizer != nullptr && seen.insert(optimizer).second &&
                        &optimizer->inside_->runtime() == &runtime_,
                    ErrorKind::kUsage,
                    "set_trainable: found an optimizer that is null, named twice or of another "
                    "model, expected each of this model once");
    }
  }

  /// Resolves the new contracts, without changing anything. Errors: kContract.
  void resolve(const std::vector<TrainableChange>& changes) {
    const auto rules = rules_of(changes);
    grad::RuleBook book(rules, "set_trainable, change");
    ask(model_, book);
    book.check_all_matched();
    TESSERA_CHECK(std::ranges::count(now_, true, &GradContract::trainable) > 0,
                  ErrorKind::kContract,
                  "set_trainable: found nothing left to train, expected at least one parameter");
    std::string lines = to_lines(ModelContract{std::move(now_), {}, {}});
    for (const auto* optimizer : followers_) lines += optimizer->inside_->summary();
    const auto lost = what_does_not_fit();
    runtime_.agree(lines + lost, "trainable parameters",
                   "make the same changes with the same optimizers on every rank");
    TESSERA_CHECK(lost.empty(), ErrorKind::kContract, "set_trainable: ", lost,
                  "; keep it sharded, or wider by a [[precision.rule]]");
  }

  void move() {
    if (changed_.empty()) return;
    std::map<fsdp::UnitId, fsdp::Unit*> units;  // in the same order on every rank
    for (auto& [parameter, contract] : changed_) {
      parameter->contract = std::move(contract);
      units.emplace(parameter->unit->id(), parameter->unit);
    }
    try {
      runtime_.begin_relayout();
      for (const auto& [id, unit] : units) move(*unit);
      for (auto* optimizer : followers_) optimizer->inside_->follow(model_);
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
      const auto named = names_.named(contract);
      const auto asked = book.ask(named.name, named.aliases);
      if (!asked.frozen || is_asked_for(contract, asked.frozen->value)) continue;
      auto next = grad::retrained(contract, *asked.frozen, handle.policy_);
      next.raw_sum_by_autograd =
          next.trainable && own.parameter->leaves.size() <= contract.aliases.size();
      now_.back() = next;
      changed_.push_back({own.parameter, std::move(next)});
    }
    for (const auto& inner : handle.inner_) ask(*inner.handle, book);
  }

  /// Returns a message about values of this rank that a narrower copy cannot hold; "" for none.
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
    const auto rebucketed = fsdp::rebucket(unit);
    std::vector<fsdp::Carried> carried;
    for (const auto& moved : rebucketed) {
      carried.push_back({&moved, moved.old_shard, moved.parameter->shard.variable_data()});
    }
    for (auto* optimizer : followers_) optimizer->inside_->carry_state(rebucketed, carried);
    fsdp::carry(runtime_, unit, carried);
  }

  ShardedBase& model_;
  const fsdp::ModelNames names_;
  fsdp::Runtime& runtime_;
  const std::vector<Optimizer*>& followers_;
  std::vector<Changed> changed_;
  std::vector<GradContract> now_;  // the new contracts of all parameters
};

void set_trainable(ShardedBase& model, const std::vector<TrainableChange>& changes,
                   const std::vector<Optimizer*>& follow) {
  const at::NoGradGuard no_grad;
  TrainableChanger changer(model, follow);
  changer.resolve(changes);
  changer.move();
}

}  // namespace tessera
