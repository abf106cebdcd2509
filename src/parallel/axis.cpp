#include "parallel/axis.h"

#include <ATen/record_function.h>

#include <numeric>
#include <utility>

#include "base/trace.h"
#include "comm/batch.h"
#include "tessera/error.h"

namespace tessera::parallel {
namespace {

struct KindOf {
  comm::Kind operator()(const comm::AllGather&) const { return comm::Kind::kAllGather; }
  comm::Kind operator()(const comm::ReduceScatter&) const { return comm::Kind::kReduceScatter; }
  comm::Kind operator()(const comm::AllReduce&) const { return comm::Kind::kAllReduce; }
  comm::Kind operator()(const comm::AllToAll&) const { return comm::Kind::kAllToAll; }
};

/// Bytes that this rank sends, as comm/group.h has them.
struct SentBytes {
  int ranks;
  int rank;

  std::int64_t operator()(const comm::AllGather& op) const {
    return part(static_cast<std::int64_t>(op.buffer.nbytes()));
  }
  std::int64_t operator()(const comm::ReduceScatter& op) const {
    return part(static_cast<std::int64_t>(op.input.nbytes()));
  }
  std::int64_t operator()(const comm::AllReduce& op) const {
    const auto data = static_cast<std::int64_t>(op.data.nbytes());
    constexpr std::int64_t kToEveryone = std::int64_t{256} << 10;
    if (ranks == 2 || data * ranks <= kToEveryone) return (ranks - 1) * data;
    return part(data + static_cast<std::int64_t>(op.result().nbytes()));
  }
  std::int64_t operator()(const comm::AllToAll& op) const {
    const std::int64_t all = std::accumulate(op.sends.begin(), op.sends.end(), std::int64_t{0});
    return (all - op.sends[static_cast<std::size_t>(rank)]) *
           static_cast<std::int64_t>(op.input.element_size());
  }

 private:
  std::int64_t part(std::int64_t bytes) const { return bytes / ranks * (ranks - 1); }
};

}  // namespace

Axis::Axis(std::shared_ptr<comm::Group> group, std::string name, std::optional<at::ScalarType> sums)
    : group_(std::move(group)), name_(std::move(name)), sums_(sums) {}

void Axis::run(comm::Op op, const char* what) const {
  TESSERA_INVARIANT(size() > 1, "a collective of one rank");
  RECORD_USER_SCOPE("tessera::wait");
  comm::Batch batch;
  batch.label.kind = std::visit(KindOf{}, op);
  batch.label.unit = concat(name_, ", ", what);
  batch.ops.push_back(std::move(op));
  Trace* const trace = current_trace();
  if (trace == nullptr) {
    group_->issue(std::move(batch))->wait();
    return;
  }
  TraceSpan span;
  span.row = TraceRow::kActivations;
  span.name = batch.label.unit;
  span.arguments = {{"axis", name_},
                    {"kind", std::string(comm::to_string(batch.label.kind))},
                    {"sent_bytes", std::visit(SentBytes{size(), rank()}, batch.ops.front())}};
  span.begin = TraceClock::now();
  group_->issue(std::move(batch))->wait();
  span.end = TraceClock::now();
  trace->add(std::move(span));
}

}  // namespace tessera::parallel
