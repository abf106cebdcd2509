#include "layout/model_plan.h"

#include <utility>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::layout {
namespace {

/// Returns the buckets of `plan` that `keep` chooses, with their items in the order of the buckets.
template <class Keep>
PlannedUnit chosen(const UnitPlan& plan, const std::vector<PlanItem>& items, const Keep& keep) {
  PlannedUnit unit{{plan.name, {}}, {}};
  for (const BucketPlan& bucket : plan.buckets) {
    if (!keep(bucket)) continue;
    unit.plan.buckets.push_back(bucket);
    for (Placed& placed : unit.plan.buckets.back().parameters) {
      const std::size_t number = unit.items.size();
      unit.items.push_back(items.at(placed.parameter));
      placed.parameter = number;
    }
  }
  return unit;
}

void append(PlannedUnit& unit, const PlannedUnit& more) {
  for (BucketPlan bucket : more.plan.buckets) {
    for (Placed& placed : bucket.parameters) placed.parameter += unit.items.size();
    unit.plan.buckets.push_back(std::move(bucket));
  }
  unit.items.insert(unit.items.end(), more.items.begin(), more.items.end());
}

std::int64_t sum_of(const PlannedUnit& unit, std::int64_t (*bytes)(const BucketPlan&)) {
  std::int64_t sum = 0;
  for (const BucketPlan& bucket : unit.plan.buckets) sum += sent_bytes(bytes(bucket), bucket.ranks);
  return sum;
}

}  // namespace

std::int64_t gather_sent_bytes(const PlannedUnit& unit) { return sum_of(unit, gathered_bytes); }
std::int64_t reduce_sent_bytes(const PlannedUnit& unit) { return sum_of(unit, reduced_bytes); }

bool is_small(const BucketPlan& bucket, std::int64_t merge_below_bytes) {
  return !bucket.key.replicated && gathered_bytes(bucket) < merge_below_bytes;
}

// fsdp/contracts.cpp (move_small) does the same to tensors of units that are laid out already: a
// plan alone would not say which leaves of which modules move with them.
ModelPlan plan_model(const UnitItems& outermost, const std::vector<UnitItems>& inner,
                     const PlanOptions& options, std::int64_t merge_below_bytes) {
  const auto all = [](const BucketPlan&) { return true; };
  const auto small = [&](const BucketPlan& bucket) { return is_small(bucket, merge_below_bytes); };
  const auto large = [&](const BucketPlan& bucket) { return !is_small(bucket, merge_below_bytes); };
  const auto planned = [&](const UnitItems& unit) {
    UnitPlan plan = plan_unit(unit.name, unit.items, options);
    validate(plan, unit.items, options);
    return plan;
  };
  ModelPlan model{options, {}};
  model.units.push_back(chosen(planned(outermost), outermost.items, all));
  UnitItems moved{outermost.name, {}};
  for (const UnitItems& unit : inner) {
    const UnitPlan plan = planned(unit);
    model.units.push_back(chosen(plan, unit.items, large));
    const auto leaving = chosen(plan, unit.items, small).items;
    moved.items.insert(moved.items.end(), leaving.begin(), leaving.end());
  }
  append(model.units.front(), chosen(planned(moved), moved.items, all));
  return model;
}

std::string to_string(const ModelPlan& plan) {
  std::string text;
  for (const PlannedUnit& unit : plan.units) text += to_string(unit.plan, unit.items);
  return text;
}

std::uint64_t hash(const ModelPlan& plan) {
  return Hasher()
      .add(std::string_view("plan 1"))
      .add(std::int64_t{plan.options.ranks})
      .add(plan.options.alignment_bytes)
      .add(std::string_view(to_string(plan)))
      .digest();
}

}  // namespace tessera::layout
