// The validator of bucket plans: says of any plan, wherever it came from, whether it keeps the
// promises of bucket_plan.h. It shares no arithmetic with plan_unit, so that a mistake there is
// seen here.
#include <algorithm>

#include "layout/bucket_plan.h"
#include "tessera/error.h"

namespace tessera::layout {
namespace {

void check_length(const BucketPlan& bucket, const std::string& where, const PlanOptions& options) {
  const int ranks = options.ranks_of(bucket.key);
  TESSERA_INVARIANT(bucket.ranks == ranks, where, ": found ", bucket.ranks, " ranks, expected ",
                    ranks);
  TESSERA_INVARIANT(!bucket.key.replicated || !bucket.key.trainable, where,
                    ": replicated, but trained");
  TESSERA_INVARIANT(bucket.numel >= 0 && bucket.numel % (std::int64_t{ranks} * kSliceQuantum) == 0,
                    where, ": found ", bucket.numel, " elements, expected a multiple of ", ranks,
                    " x ", kSliceQuantum);
  std::int64_t covered = 0;
  for (int rank = 0; rank < bucket.ranks; ++rank) {
    const Range slice = bucket.slice(rank);
    TESSERA_INVARIANT(slice.begin == covered && slice.size() == bucket.slice_numel(), where,
                      ": the slice of rank ", rank, " is ", slice.begin, " .. ", slice.end);
    covered = slice.end;
  }
  TESSERA_INVARIANT(covered == bucket.numel, where, ": slices cover ", covered, " of ",
                    bucket.numel);
}

/// Also marks the items that the bucket holds.
void check_parameters(const BucketPlan& bucket, const std::string& where,
                      const std::vector<PlanItem>& items, const PlanOptions& options,
                      std::vector<int>& seen) {
  TESSERA_INVARIANT(!bucket.parameters.empty(), where, ": holds no parameter");
  std::int64_t end = 0;
  const Placed* before = nullptr;
  for (const Placed& placed : bucket.parameters) {
    TESSERA_INVARIANT(placed.parameter < items.size(), where, ": parameter ", placed.parameter,
                      " of ", items.size());
    const PlanItem& item = items[placed.parameter];
    TESSERA_INVARIANT(++seen[placed.parameter] == 1, where, ": ", item.name, " is placed twice");
    TESSERA_INVARIANT(before == nullptr || before->parameter < placed.parameter, where, ": ",
                      item.name, " is out of order");
    TESSERA_INVARIANT(placed.numel == item.numel && placed.numel >= 0, where, ": ", item.name,
                      " has ", placed.numel, " elements, expected ", item.numel);
    TESSERA_INVARIANT(item.key == bucket.key, where, ": ", item.name, " belongs to ",
                      to_string(item.key), ", not to ", to_string(bucket.key));
    TESSERA_INVARIANT(placed.offset >= end, where, ": ", item.name, " begins at ", placed.offset,
                      ", before the end of the one before, ", end);
    TESSERA_INVARIANT(placed.numel <= bucket.numel && placed.offset <= bucket.numel - placed.numel,
                      where, ": ", item.name, " ends past the bucket's ", bucket.numel);
    const std::int64_t step =
        std::max<std::int64_t>(1, options.alignment_bytes / size_of(bucket.key.compute));
    TESSERA_INVARIANT(placed.numel == 0 || placed.offset % step == 0, where, ": ", item.name,
                      " begins at element ", placed.offset, ", expected a multiple of ",
                      options.alignment_bytes, " bytes");
    end = placed.offset + placed.numel;
    before = &placed;
  }
  TESSERA_INVARIANT(bucket.numel - end < std::int64_t{bucket.ranks} * kSliceQuantum, where,
                    ": ends with ", bucket.numel - end, " elements of padding");
}

}  // namespace

void validate(const UnitPlan& plan, const std::vector<PlanItem>& items,
              const PlanOptions& options) {
  std::vector<int> seen(items.size(), 0);
  std::size_t first = 0;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketPlan& bucket = plan.buckets[b];
    const std::string where = concat("plan of unit ", plan.name, ", bucket ", b);
    check_length(bucket, where, options);
    check_parameters(bucket, where, items, options, seen);
    for (std::size_t other = 0; other < b; ++other) {
      TESSERA_INVARIANT(!(plan.buckets[other].key == bucket.key), where, ": same key as bucket ",
                        other);
    }
    const std::size_t head = bucket.parameters.front().parameter;
    TESSERA_INVARIANT(b == 0 || first < head, where, ": buckets are not in order of appearance");
    first = head;
  }
  for (std::size_t index = 0; index < items.size(); ++index) {
    TESSERA_INVARIANT(seen[index] == 1, "plan of unit ", plan.name, ": ", items[index].name,
                      " is not placed");
  }
}

}  // namespace tessera::layout
