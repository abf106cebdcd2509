#include "fsdp/relayout.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "fsdp/runtime/runtime.h"
#include "grad/contract_key.h"
#include "grad/finite_copy.h"
#include "tessera/error.h"

namespace tessera::fsdp {
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
  if (auto* group = on.control; group != nullptr) {
    comm::Batch batch;
    batch.label = {comm::Kind::kAllToAll, unit.shown_name() + " (laid out anew)", unit.id(), 0,
                   unit.runtime().model_name()};
    batch.ops.emplace_back(std::move(exchange));
    group->issue(std::move(batch))->wait();
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
