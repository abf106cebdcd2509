#include "layout/bucket_plan.h"

#include <algorithm>
#include <limits>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::layout {
namespace {

/// Returns the smallest multiple of `step` that is not below `value`.
std::int64_t round_up(std::int64_t value, std::int64_t step) {
  const std::int64_t over = value % step;
  if (over == 0) return value;
  TESSERA_INVARIANT(value <= std::numeric_limits<std::int64_t>::max() - (step - over),
                    "a bucket of more than 2^63 elements");
  return value + (step - over);
}

std::int64_t add(std::int64_t a, std::int64_t b) {
  TESSERA_INVARIANT(a <= std::numeric_limits<std::int64_t>::max() - b,
                    "a bucket of more than 2^63 elements");
  return a + b;
}

/// Returns the alignment in elements of the compute dtype.
std::int64_t alignment_numel(const BucketKey& key, const PlanOptions& options) {
  const std::int64_t bytes = size_of(key.compute);
  TESSERA_INVARIANT(options.alignment_bytes > 0 && options.alignment_bytes % bytes == 0,
                    "alignment of ", options.alignment_bytes, " bytes for elements of ", bytes);
  return options.alignment_bytes / bytes;
}

BucketPlan& bucket_for(UnitPlan& plan, const BucketKey& key, const PlanOptions& options) {
  const auto found = std::find_if(plan.buckets.begin(), plan.buckets.end(),
                                  [&](const BucketPlan& bucket) { return bucket.key == key; });
  if (found != plan.buckets.end()) return *found;
  plan.buckets.push_back({key, options.ranks_of(key), 0, {}});
  return plan.buckets.back();
}

/// Returns the line with the bytes of a bucket.
std::string bytes_line(const BucketPlan& bucket) {
  const auto sent = [&](std::int64_t bytes) { return sent_bytes(bytes, bucket.ranks); };
  std::string text =
      concat("    a rank keeps ", shard_bytes(bucket), " B, gathers ", gathered_bytes(bucket),
             " B (sends ", sent(gathered_bytes(bucket)), ")");
  if (bucket.key.trainable) {
    text +=
        concat(", reduces ", reduced_bytes(bucket), " B (sends ", sent(reduced_bytes(bucket)), ")");
  }
  return text + "\n";
}

std::int64_t widest_bytes(const BucketKey& key) {
  return std::max({size_of(key.storage), size_of(key.compute), size_of(key.accumulate),
                   size_of(key.reduce), size_of(key.final)});
}

}  // namespace

Range BucketPlan::slice(int rank) const {
  TESSERA_INVARIANT(0 <= rank && rank < ranks, "rank ", rank, " of ", ranks);
  return {rank * slice_numel(), (rank + 1) * slice_numel()};
}

Range BucketPlan::owned(const Placed& placed, int rank) const {
  const Range mine = intersect(slice(rank), {placed.offset, placed.offset + placed.numel});
  if (mine.empty()) return {};
  return {mine.begin - placed.offset, mine.end - placed.offset};
}

std::int64_t BucketPlan::offset_in_slice(const Placed& placed, int rank) const {
  const Range mine = owned(placed, rank);
  return mine.empty() ? 0 : placed.offset + mine.begin - slice(rank).begin;
}

int PlanOptions::ranks_of(const BucketKey& key) const {
  if (key.replicated) return 1;
  if (mesh.dense().axes().empty()) return ranks;
  int product = 1;
  for (const std::string& axis : key.reductions.shard_axes) product *= mesh.size_of(axis);
  return product;
}

UnitPlan plan_unit(const std::string& name, const std::vector<PlanItem>& items,
                   const PlanOptions& options) {
  TESSERA_INVARIANT(options.ranks >= 1, "a bucket plan for ", options.ranks, " ranks");
  UnitPlan plan{name, {}};
  for (std::size_t index = 0; index < items.size(); ++index) {
    const PlanItem& item = items[index];
    TESSERA_INVARIANT(item.numel >= 0, "parameter ", item.name, " of ", item.numel, " elements");
    BucketPlan& bucket = bucket_for(plan, item.key, options);
    if (item.numel > 0) bucket.numel = round_up(bucket.numel, alignment_numel(item.key, options));
    bucket.parameters.push_back({index, bucket.numel, item.numel});
    bucket.numel = add(bucket.numel, item.numel);
  }
  for (BucketPlan& bucket : plan.buckets) {
    bucket.numel = round_up(bucket.numel, std::int64_t{bucket.ranks} * kSliceQuantum);
    TESSERA_INVARIANT(
        bucket.numel <= std::numeric_limits<std::int64_t>::max() / widest_bytes(bucket.key),
        "a bucket of more than 2^63 bytes");
  }
  return plan;
}

std::string to_string(const BucketKey& key) {
  std::string text(to_string(key.storage));
  if (key.compute != key.storage) text += concat(" -> ", to_string(key.compute));
  if (key.rounding == Rounding::kHalfAway) text += " (halves away from zero)";
  if (key.trainable) {
    text += concat(", accumulate ", to_string(key.accumulate), ", reduce ", to_string(key.reduce),
                   ", final ", to_string(key.final));
  } else {
    text += key.replicated ? ", frozen, whole on every rank" : ", frozen";
  }
  return text + ", " + to_string(key.reductions);
}

std::int64_t gathered_bytes(const BucketPlan& bucket) {
  return bucket.numel * size_of(bucket.key.compute);
}

std::int64_t reduced_bytes(const BucketPlan& bucket) {
  return bucket.key.trainable ? bucket.numel * size_of(bucket.key.reduce) : 0;
}

std::int64_t shard_bytes(const BucketPlan& bucket) {
  return bucket.slice_numel() * size_of(bucket.key.storage);
}

std::int64_t padding_numel(const BucketPlan& bucket) {
  std::int64_t used = 0;
  for (const Placed& placed : bucket.parameters) used += placed.numel;
  return bucket.numel - used;
}

std::int64_t sent_bytes(std::int64_t bytes, int ranks) { return bytes / ranks * (ranks - 1); }

std::string to_string(const UnitPlan& plan, const std::vector<PlanItem>& items) {
  std::string text = concat("unit ", unit_label(plan.name), "\n");
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketPlan& bucket = plan.buckets[b];
    text += concat("  bucket ", b, ": ", to_string(bucket.key), "; ", bucket.numel, " elements, ",
                   padding_numel(bucket), " padding, ", bucket.ranks, " x ", bucket.slice_numel(),
                   "\n", bytes_line(bucket));
    for (const Placed& placed : bucket.parameters) {
      TESSERA_INVARIANT(placed.parameter < items.size(), "item ", placed.parameter, " of ",
                        items.size());
      text += concat("    ", placed.offset, " .. ", placed.offset + placed.numel, "  ",
                     items[placed.parameter].name, "\n");
    }
  }
  return text;
}

// The validator checks any plan against the properties in the header. It shares no arithmetic with
// plan_unit, so that it finds mistakes there.

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

/// Also counts the bucket's items in `seen`.
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
