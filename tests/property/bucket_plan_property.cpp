// Bucket plans over random units: for all sizes, dtypes and ranks, every element has one owner.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "layout/bucket_plan.h"
#include "support/test.h"

namespace tessera::layout::bucket_plan_property {
namespace {

rc::Gen<DType> any_dtype() {
  return rc::gen::element(DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                          DType::kUInt8);
}

rc::Gen<BucketKey> any_key() {
  return rc::gen::map(rc::gen::tuple(any_dtype(), any_dtype(), rc::gen::inRange(0, 3)),
                      [](const std::tuple<DType, DType, int>& drawn) {
                        BucketKey key;
                        key.storage = std::get<0>(drawn);
                        key.compute = std::get<1>(drawn);
                        key.trainable = std::get<2>(drawn) == 0;
                        key.replicated = std::get<2>(drawn) == 1;
                        return key;
                      });
}

/// Sizes around the boundaries that matter: nothing, one, primes, whole cache lines, many.
rc::Gen<std::int64_t> any_numel() {
  return rc::gen::oneOf(rc::gen::element<std::int64_t>(0, 1, 2, 31, 63, 64, 65, 127, 128, 4096),
                        rc::gen::inRange<std::int64_t>(0, 5000));
}

std::vector<PlanItem> draw_items() {
  const auto keys = *rc::gen::nonEmpty(rc::gen::container<std::vector<BucketKey>>(any_key()));
  const auto sizes = *rc::gen::container<std::vector<std::int64_t>>(any_numel());
  std::vector<PlanItem> items;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto pick = *rc::gen::inRange<std::size_t>(0, keys.size());
    items.push_back({"p" + std::to_string(i), sizes[i], keys[pick]});
  }
  return items;
}

PlanOptions draw_options() {
  return {*rc::gen::inRange(1, 10), *rc::gen::element<std::int64_t>(64, 256)};
}

RC_GTEST_PROP(BucketPlanProperty, IsValidAndDeterministic, ()) {
  const std::vector<PlanItem> items = draw_items();
  const PlanOptions options = draw_options();
  const UnitPlan plan = plan_unit("u", items, options);
  validate(plan, items, options);
  RC_ASSERT(plan == plan_unit("u", items, options));
}

RC_GTEST_PROP(BucketPlanProperty, OwnedRangesPartitionEveryParameter, ()) {
  const std::vector<PlanItem> items = draw_items();
  const PlanOptions options = draw_options();
  for (const BucketPlan& bucket : plan_unit("u", items, options).buckets) {
    for (const Placed& placed : bucket.parameters) {
      std::int64_t next = 0;
      RC_ASSERT(bucket.ranks == (bucket.key.replicated ? 1 : options.ranks));
      for (int rank = 0; rank < bucket.ranks; ++rank) {
        const Range mine = bucket.owned(placed, rank);
        if (mine.empty()) {
          RC_ASSERT(mine == Range{});
          continue;
        }
        RC_ASSERT(mine.begin == next);
        next = mine.end;
        const std::int64_t at = bucket.offset_in_slice(placed, rank);
        RC_ASSERT(at >= 0 && at + mine.size() <= bucket.slice_numel());
        RC_ASSERT(bucket.slice(rank).begin + at == placed.offset + mine.begin);
      }
      RC_ASSERT(next == placed.numel);
    }
  }
}

RC_GTEST_PROP(BucketPlanProperty, PaddingIsBounded, ()) {
  const std::vector<PlanItem> items = draw_items();
  const PlanOptions options = draw_options();
  for (const BucketPlan& bucket : plan_unit("u", items, options).buckets) {
    std::int64_t used = 0;
    for (const Placed& placed : bucket.parameters) used += placed.numel;
    const std::int64_t gap = options.alignment_bytes / size_of(bucket.key.compute);
    const auto gaps = static_cast<std::int64_t>(bucket.parameters.size());
    RC_ASSERT(bucket.numel - used < gap * gaps + options.ranks * kSliceQuantum);
  }
}

RC_GTEST_PROP(RangeProperty, IntersectionHoldsWhatBothHold, ()) {
  const auto edge = rc::gen::inRange<std::int64_t>(-5, 15);
  const Range a{*edge, *edge};
  const Range b{*edge, *edge};
  const Range both = intersect(a, b);
  RC_ASSERT(both == intersect(b, a));
  const auto holds = [](const Range& r, std::int64_t x) { return r.begin <= x && x < r.end; };
  for (std::int64_t x = -6; x < 16; ++x) {
    RC_ASSERT(holds(both, x) == (holds(a, x) && holds(b, x)));
  }
}

}  // namespace
}  // namespace tessera::layout::bucket_plan_property
