#include "comm/traced_collective.h"

#include "base/unit_label.h"
#include "comm/batch.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

TraceRow row_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return TraceRow::kGathers;
    case Kind::kReduceScatter:
      return TraceRow::kReductions;
    case Kind::kAllReduce:
    case Kind::kAllToAll:
    case Kind::kAnyOf:
    case Kind::kSumOf:
    case Kind::kBatch:
      break;
  }
  return TraceRow::kReplicas;
}

double in_ms(TraceClock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

std::uint32_t bucket_of(const Op& op, std::uint32_t otherwise) {
  return std::visit([&](const auto& one) { return one.bucket_or(otherwise); }, op);
}

}  // namespace

std::unique_ptr<TracedCollective> TracedCollective::of(const Batch& batch, const Group& group) {
  Trace* const trace = current_trace();
  if (trace == nullptr) return nullptr;
  auto traced = std::make_unique<TracedCollective>();
  traced->trace_ = trace->shared_from_this();
  traced->submitted_ = TraceClock::now();
  TraceSpan& span = traced->span_;
  span.row = row_of(batch.label.kind);
  span.name = unit_label(batch.label.unit);
  Entry entry;
  describe(batch, 0, entry);
  std::int64_t bytes = 0;
  for (const OpFacts& op : entry.ops) bytes += op.bytes;
  span.arguments = {{"kind", std::string(to_string(batch.label.kind))},
                    {"unit", span.name},
                    {"micro_batch", std::int64_t{batch.label.micro_batch}},
                    {"buffer_bytes", bytes},
                    {"sent_bytes", sent_bytes(batch, group.size(), group.rank())}};
  for (std::size_t i = 0; i < entry.ops.size(); ++i) {
    span.arguments.emplace_back(
        concat("bucket ", bucket_of(batch.ops[i], static_cast<std::uint32_t>(i))),
        concat(entry.ops[i].bytes, " B ", c10::toString(entry.ops[i].wire)));
  }
  return traced;
}

void TracedCollective::issued() {
  span_.begin = TraceClock::now();
  span_.arguments.emplace_back("queued_ms", in_ms(span_.begin - submitted_));
}

void TracedCollective::waited_since(TraceClock::time_point begin) {
  span_.end = TraceClock::now();
  span_.arguments.emplace_back("waited_ms", in_ms(span_.end - begin));
  trace_->add({TraceRow::kWaits, span_.name, begin, span_.end, {span_.arguments.front()}});
  trace_->add(std::move(span_));
}

}  // namespace tessera::comm
