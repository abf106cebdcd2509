#include "fsdp/runtime/reducer.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kInFlightBytes = std::int64_t{32} << 20;
constexpr int kUnitsInFlight = 2;

}  // namespace

void Reducer::issue(comm::IssueQueue& queue, Unit& unit, const std::string& marks) {
  unit.for_groups(&BucketGroups::reduce,
                  [&](comm::Group* group) { issue(queue, unit, group, marks); });
}

void Reducer::issue(comm::IssueQueue& queue, Unit& unit, comm::Group* group,
                    const std::string& marks) {
  comm::Batch batch;
  batch.label = {comm::Kind::kReduceScatter, unit.shown_name(), unit.id(), 0, marks};
  std::int64_t bytes = 0;
  const bool on_device = group != nullptr && group->stream();
  std::vector<Bucket*> sent;
  for (auto& bucket : unit.buckets()) {
    if (bucket->groups().reduce != group || !bucket->trainable()) continue;
    bytes += bucket->begin_reduce(batch);
    if (group == nullptr) continue;
    on_device ? sent.push_back(bucket.get()) : bucket->fill_reduce();
  }
  if (batch.ops.empty()) return;
  if (on_device && !ended_) ended_ = comm::Stream::make(device_);
  while (!has_room_for(unit, bytes)) free_oldest();
  ++issued_;
  std::function<void()> fill;
  if (on_device) {
    fill = [&] {
      for (auto* bucket : sent) bucket->fill_reduce();
    };
  }
  under_way_.push_back(
      {&unit, group, queue.submit(*group, std::move(batch), std::move(fill)), bytes});
  bytes_ += bytes;
}

bool Reducer::has_room_for(const Unit& unit, std::int64_t bytes) const {
  if (under_way_.empty()) return true;
  if (budget_ || device_.is_cpu()) return bytes_ + bytes <= budget_.value_or(kInFlightBytes);
  int units = 0;
  const Unit* last = &unit;
  for (auto one = under_way_.rbegin(); one != under_way_.rend(); ++one) {
    if (one->unit != last) ++units;
    last = one->unit;
  }
  return units < kUnitsInFlight;
}

/// Waits for the oldest reduction: on a device in the stream ended_, on the host until all ranks
/// have issued it.
void Reducer::free_oldest() {
  auto oldest = std::move(under_way_.front());
  under_way_.pop_front();
  const comm::StreamScope there(ended_);
  oldest.work.wait();
  for (auto& bucket : oldest.unit->buckets()) {
    if (bucket->groups().reduce == oldest.group) bucket->finish_reduce();
  }
  bytes_ -= oldest.bytes;
}

void Reducer::free_wires(const Unit& unit) {
  const auto is_under_way = [&] {
    return std::ranges::any_of(under_way_, [&](const UnderWay& one) { return one.unit == &unit; });
  };
  while (is_under_way()) free_oldest();
}

void Reducer::order_after_reductions() const {
  if (ended_) comm::order(ended_, comm::Stream::current(device_), comm::EventSite::kReduced);
}

void Reducer::finish(const Unit& unit) {
  free_wires(unit);
  order_after_reductions();
}

void Reducer::finish_all() {
  while (!under_way_.empty()) free_oldest();
  order_after_reductions();
}

void Reducer::drop(const Unit& unit) {
  std::erase_if(under_way_, [&](const UnderWay& one) {
    if (one.unit == &unit) bytes_ -= one.bytes;
    return one.unit == &unit;
  });
}

void Reducer::drop_all() {
  under_way_.clear();
  bytes_ = 0;
}

}  // namespace tessera::fsdp
