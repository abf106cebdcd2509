#include "layout/bucket_plan.h"

#include <algorithm>
#include <limits>

#include "base/unit_label.h"
#include "tessera/error.h"

namespace tessera::layout {
namespace {

/// The smallest multiple of `step` that is not below `value`.
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

/// Elements of the compute dtype that make up the alignment.
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

/// What the elements of the line above are in bytes.
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

}  // namespace tessera::layout
