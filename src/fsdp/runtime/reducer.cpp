#include "fsdp/runtime/reducer.h"

#include <algorithm>

#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {

void Reducer::issue(comm::IssueQueue& queue, Unit& unit, const std::string& marks) {
  unit.for_groups(&BucketGroups::reduce,
                  [&](comm::Group* group) { issue(queue, unit, group, marks); });
}

void Reducer::issue(comm::IssueQueue& queue, Unit& unit, comm::Group* group,
                    const std::string& marks) {
  comm::Batch batch;
  batch.label = {comm::Kind::kReduceScatter, unit.shown_name(), unit.id(), 0, marks};
  std::int64_t bytes = 0;
  for (auto& bucket : unit.buckets()) {
    if (bucket->groups().reduce != group || !bucket->trainable()) continue;
    bytes += bucket->begin_reduce(batch);
  }
  if (batch.ops.empty()) return;
  while (!under_way_.empty() && bytes_ + bytes > budget_) finish_oldest();
  ++issued_;
  under_way_.push_back({&unit, group, queue.submit(*group, std::move(batch)), bytes});
  bytes_ += bytes;
}

void Reducer::finish_oldest() {
  auto oldest = std::move(under_way_.front());
  under_way_.pop_front();
  oldest.work.wait();
  for (auto& bucket : oldest.unit->buckets()) {
    if (bucket->groups().reduce == oldest.group) bucket->finish_reduce();
  }
  bytes_ -= oldest.bytes;
}

void Reducer::finish(const Unit& unit) {
  const auto is_under_way = [&] {
    return std::ranges::any_of(under_way_, [&](const UnderWay& one) { return one.unit == &unit; });
  };
  while (is_under_way()) finish_oldest();
}

void Reducer::finish_all() {
  while (!under_way_.empty()) finish_oldest();
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
