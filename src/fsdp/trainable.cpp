// set_trainable, step by step: what changes, whether all ranks mean the same, then unit by unit the
// new layout and what moves.
#include "tessera/trainable.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <vector>

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
#include "tessera/optim.h"

namespace tessera::fsdp {

// Relayout: a unit's parameters in the buckets that their changed contracts ask for, and the bytes
// on their way there. First every rank lays the unit out anew (no communication), then what lay
// elsewhere travels in one all-to-all among the ranks of a shard group; replicas do the same among
// themselves. What is sent follows from the two plans, which all ranks know.

/// A parameter whose elements lie elsewhere than before.
struct Relaid {
  Parameter* parameter = nullptr;
  AxesGroups on;                    ///< the ranks that share it
  std::vector<layout::Move> moves;  ///< between them
  layout::Range before, after;      ///< what this rank held and holds
  std::uint32_t old_version = 0;    ///< of the shard, which has a new one now
  at::Tensor old_shard;             ///< [before]; the new one is parameter->shard, [after], zeros
};

/// Gives the unit the buckets that its parameters' contracts name now. Buckets that come out as
/// they were keep their memory. The unit must be released, without gradients under way.
std::vector<Relaid> lay_out_anew(Unit& unit);

/// Values over the elements of one relaid parameter.
struct Carried {
  const Relaid* parameter = nullptr;
  at::Tensor from;  ///< [before]
  at::Tensor to;    ///< [after]; other dtypes are converted
};

/// Fills every `to`. Collective over the shard groups. Errors: kComm.
void carry(Runtime& runtime, const Unit& unit, const std::vector<Carried>& all);

namespace {

/// Stretches begin at multiples of this, so that each can be read in its dtype.
constexpr std::int64_t kStretchAlignment = 16;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kStretchAlignment - 1) / kStretchAlignment * kStretchAlignment;
}

/// Also of what is whole on every rank now: it may be shared out later.
AxesGroups groups_of(Runtime& runtime, const GradContract& contract) {
  return runtime.groups().of({.reductions = contract.reductions});
}

/// What every rank of the shard group holds of a parameter.
std::vector<layout::Range> holdings(const layout::BucketPlan& plan, const layout::Placed& placed,
                                    int ranks) {
  std::vector<layout::Range> held;
  for (int rank = 0; rank < ranks; ++rank) {
    held.push_back(plan.owned(placed, plan.ranks == 1 ? 0 : rank));
  }
  return held;
}

layout::UnitPlan plan_anew(const Unit& unit, const layout::PlanOptions& options) {
  std::vector<layout::PlanItem> items;
  for (const auto& p : unit.parameters()) {
    items.push_back(plan_item(p->contract));
  }
  auto plan = layout::plan_unit(unit.name(), items, options);
  layout::validate(plan, items, options);
  return plan;
}

/// Whether `bucket`, the unit's number `index`, is what `plan` asks for.
bool is_as_planned(const Unit& unit, const Bucket& bucket, std::size_t index,
                   const layout::BucketPlan& plan) {
  const auto& now = bucket.plan();
  if (now.key != plan.key || now.numel != plan.numel || now.ranks != plan.ranks ||
      now.parameters.size() != plan.parameters.size()) {
    return false;
  }
  for (std::size_t place = 0; place < plan.parameters.size(); ++place) {
    const auto& wanted = plan.parameters[place];
    const auto& parameter = *unit.parameters()[wanted.parameter];
    if (parameter.bucket != index || parameter.place != place ||
        now.parameters[place].offset != wanted.offset ||
        now.parameters[place].numel != wanted.numel) {
      return false;
    }
  }
  return true;
}

std::unique_ptr<Bucket> take_as_planned(Unit& unit, const layout::BucketPlan& plan) {
  for (std::size_t index = 0; index < unit.buckets().size(); ++index) {
    auto& bucket = unit.buckets()[index];
    if (bucket && is_as_planned(unit, *bucket, index, plan)) return std::move(bucket);
  }
  return nullptr;
}

/// The parameter's tensors show its place in `bucket`.
void show(Parameter& parameter, const Bucket& bucket, const layout::Placed& placed) {
  const bool trainable = parameter.contract.trainable;
  // Off, so that the data may change its dtype.
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

at::Tensor stretch(const at::Tensor& values, const layout::Range& held,
                   const layout::Range& wanted) {
  return values.narrow(0, wanted.begin - held.begin, wanted.size());
}

/// A stretch's place in a buffer of bytes.
at::Tensor typed(const at::Tensor& bytes, std::int64_t offset, std::int64_t numel,
                 at::ScalarType dtype) {
  return bytes.narrow(0, offset, numel * static_cast<std::int64_t>(c10::elementSize(dtype)))
      .view(dtype);
}

/// Calls `visit(carried, move, its bytes)` for the moves between this rank and `peer`, in an order
/// that both know.
template <class Visit>
void for_moves(const std::vector<Carried>& all, int from, int to, const Visit& visit) {
  for (const auto& one : all) {
    for (const auto& move : one.parameter->moves) {
      if (move.from == from && move.to == to) visit(one, move);
    }
  }
}

std::int64_t bytes_of(const Carried& one, const layout::Move& move) {
  return aligned(move.range.size() * static_cast<std::int64_t>(one.from.element_size()));
}

void put(const Carried& one, const layout::Move& move, const at::Tensor& values) {
  grad::finite_copy(stretch(one.to, one.parameter->after, move.range), values,
                    "parameter " + one.parameter->parameter->contract.name);
}

}  // namespace

std::vector<Relaid> lay_out_anew(Unit& unit) {
  const at::NoGradGuard no_grad;
  auto& runtime = unit.runtime();
  const auto options = runtime.plan_options();
  const auto plan = plan_anew(unit, options);
  std::vector<std::unique_ptr<Bucket>> next;
  for (const auto& bucket_plan : plan.buckets) next.push_back(take_as_planned(unit, bucket_plan));

  std::vector<Relaid> relaid;
  for (std::size_t index = 0; index < next.size(); ++index) {
    if (next[index]) continue;
    for (const auto& placed : plan.buckets[index].parameters) {
      auto& parameter = *unit.parameters()[placed.parameter];
      const auto on = groups_of(runtime, parameter.contract);
      const auto before = holdings(unit.bucket_of(parameter).plan(), parameter.placed(), on.ranks);
      const auto after = holdings(plan.buckets[index], placed, on.ranks);
      const auto self = static_cast<std::size_t>(on.rank);
      relaid.push_back({&parameter, on, layout::plan_moves(before, after), before[self],
                        after[self], static_cast<std::uint32_t>(parameter.shard._version()),
                        parameter.shard.variable_data()});
    }
  }
  for (std::size_t index = 0; index < next.size(); ++index) {
    auto& bucket = next[index];
    const bool kept = bucket != nullptr;
    if (!kept) {
      bucket = unit.make_bucket(plan.buckets[index]);
    }
    bucket->set_number(index);
    for (std::size_t place = 0; place < plan.buckets[index].parameters.size(); ++place) {
      const auto& placed = plan.buckets[index].parameters[place];
      auto& parameter = *unit.parameters()[placed.parameter];
      parameter.bucket = index;
      parameter.place = place;
      if (!kept) show(parameter, *bucket, placed);
    }
  }
  unit.buckets() = std::move(next);
  return relaid;
}

namespace {

/// Of parameters that the same ranks share.
void carry(Runtime& runtime, const Unit& unit, const AxesGroups& on,
           const std::vector<Carried>& all) {
  const int self = on.rank;
  const int ranks = on.ranks;
  comm::AllToAll exchange;
  for (int peer = 0; peer < ranks; ++peer) {
    std::int64_t sent = 0;
    std::int64_t received = 0;
    if (peer != self) {
      for_moves(all, self, peer, [&](auto& one, auto& move) { sent += bytes_of(one, move); });
      for_moves(all, peer, self, [&](auto& one, auto& move) { received += bytes_of(one, move); });
    }
    exchange.sends.push_back(sent);
    exchange.receives.push_back(received);
  }
  const auto buffer = [&](const std::vector<std::int64_t>& counts) {
    std::int64_t bytes = 0;
    for (const auto count : counts) bytes += count;
    return at::empty({bytes},
                     at::TensorOptions().dtype(at::kByte).device(runtime.pool()->device()));
  };
  exchange.input = buffer(exchange.sends);
  exchange.output = buffer(exchange.receives);
  std::int64_t offset = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    for_moves(all, self, peer, [&](const Carried& one, const layout::Move& move) {
      const auto from = stretch(one.from, one.parameter->before, move.range);
      if (peer == self) {
        put(one, move, from);
        return;
      }
      typed(exchange.input, offset, move.range.size(), from.scalar_type()).copy_(from);
      offset += bytes_of(one, move);
    });
  }
  const auto received = exchange.output;
  if (auto* group = on.groups.gather; group != nullptr) {
    comm::Batch batch;
    batch.label = {comm::Kind::kAllToAll, unit.shown_name() + " (laid out anew)", unit.id(), 0,
                   unit.runtime().model_name()};
    batch.ops.emplace_back(std::move(exchange));
    runtime.queue().submit(*group, std::move(batch)).wait();
  }
  offset = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    for_moves(all, peer, self, [&](const Carried& one, const layout::Move& move) {
      put(one, move, typed(received, offset, move.range.size(), one.from.scalar_type()));
      offset += bytes_of(one, move);
    });
  }
}

}  // namespace

void carry(Runtime& runtime, const Unit& unit, const std::vector<Carried>& all) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<AxesGroups, std::vector<Carried>>> by_ranks;  // in the plan's order
  for (const auto& one : all) {
    const auto& on = one.parameter->on;
    auto found = std::find_if(by_ranks.begin(), by_ranks.end(),
                              [&](const auto& each) { return each.first.control == on.control; });
    if (found == by_ranks.end()) found = by_ranks.insert(by_ranks.end(), {on, {}});
    found->second.push_back(one);
  }
  for (const auto& [on, carried] : by_ranks) carry(runtime, unit, on, carried);
}

}  // namespace tessera::fsdp

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
  const fsdp::ModelNames names_;
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
