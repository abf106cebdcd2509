#include "parallel/collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/accumulate.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "base/doing.h"
#include "base/test_hooks.h"
#include "base/threads/exchange_times.h"
#include "base/trace.h"
#include "comm/batch.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/turns.h"
#include "grad/keep.h"
#include "layout/range.h"
#include "parallel/transition.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::parallel {
namespace {

comm::ActivationPass pass_of(Direction direction) {
  if (direction == Direction::kBackward) return comm::ActivationPass::kBackward;
  return grad::is_recomputing() ? comm::ActivationPass::kRecomputed
                                : comm::ActivationPass::kForward;
}

/// Returns the name that traces and tests show.
std::string shown(const std::string& where, Direction direction) {
  return direction == Direction::kBackward ? where + " backward" : where;
}

/// A collective from its issue to the end of the wait for it.
class Exchange {
 public:
  Exchange(const Axis& axis, comm::Kind kind, comm::Op op, const std::string& where,
           Direction direction)
      : gives_turn_(axis.gives_turn), under_way_(axis.group != nullptr && !axis.group->stream()) {
    TESSERA_INVARIANT(axis.group, "a collective of ", where, " on axis ", axis.name,
                      " of one rank");
    comm::Batch batch;
    batch.label.kind = kind;
    batch.label.unit = where;
    batch.label.micro_batch = UnitHere::micro_batch();
    batch.label.activations = pass_of(direction);
    batch.label.stage = UnitHere::stage();
    batch.label.within = UnitHere::unit();
    batch.ops.push_back(std::move(op));
    if (trace_ != nullptr) {
      span_.row = TraceRow::kActivations;
      span_.name = shown(where, direction);
      span_.arguments = {{"axis", axis.name},
                         {"kind", std::string(comm::to_string(kind))},
                         {"stage", std::int64_t{batch.label.stage}},
                         {"micro_batch", std::int64_t{batch.label.micro_batch}},
                         {"pass", std::string(comm::to_string(batch.label.activations))},
                         {"sent_bytes", comm::sent_bytes(batch, axis.size, axis.rank)}};
      span_.begin = trace_->now();
    }
    const auto delay = test_hooks::exchange_delay.get();
    if (delay != nullptr) {
      arrives_ = std::chrono::steady_clock::now() + (*delay)(shown(where, direction));
    }
    RECORD_USER_SCOPE("tessera::wait");
    work_ = axis.group->issue(std::move(batch));
  }

  void finish(const comm::Stream& stream = {}) {
    if (gives_turn_) comm::Turns::pass();
    RECORD_USER_SCOPE("tessera::wait");
    const auto begin = TraceClock::now();
    const comm::StreamScope there(stream);
    work_->wait();
    if (arrives_) std::this_thread::sleep_until(*arrives_);
    const std::chrono::duration<double, std::milli> waited_for = TraceClock::now() - begin;
    const double waited = waited_for.count();
    under_way_.end(waited);
    // The traced step may have ended since.
    if (trace_ == nullptr || trace_ != current_trace()) return;
    span_.end = trace_->now();
    span_.arguments.emplace_back("waited_ms", waited);
    trace_->add(std::move(span_));
  }

 private:
  const bool gives_turn_;
  base::ExchangeUnderWay under_way_;
  Trace* trace_ = current_trace();
  TraceSpan span_;
  std::optional<std::chrono::steady_clock::time_point> arrives_;  ///< set by a test
  std::unique_ptr<comm::Work> work_;
};

void run(const Axis& axis, comm::Kind kind, comm::Op op, const std::string& where,
         Direction direction) {
  Exchange(axis, kind, std::move(op), where, direction).finish();
}

/// Return the dtype in which addends are sent, and the one in which they are added.
at::ScalarType wire_dtype(const at::Tensor& x, const Axis& axis) {
  return axis.reduce.value_or(x.scalar_type());
}
at::ScalarType sum_dtype(at::ScalarType wire) {
  return wire == at::kBFloat16 || wire == at::kHalf ? at::kFloat : wire;
}

/// A cut with all sizes: of the dims before it, the whole dim, the largest part, the dims after it.
struct Layout {
  std::int64_t outer = 1;
  std::int64_t total = 0;
  std::int64_t largest = 0;
  std::int64_t inner = 1;
  bool even(const Axis& axis) const { return largest * axis.size == total; }
};

Layout layout_of(const at::Tensor& x, std::int64_t dim, std::int64_t total, const Axis& axis) {
  const auto sizes = x.sizes();
  return {c10::multiply_integers(sizes.begin(), sizes.begin() + dim), total,
          layout::part_of(total, axis.size, 0).size(),
          c10::multiply_integers(sizes.begin() + dim + 1, sizes.end())};
}

std::vector<std::int64_t> with_dim(const at::Tensor& x, std::int64_t dim, std::int64_t size) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = size;
  return sizes;
}

}  // namespace

at::Tensor exchange_sum(const at::Tensor& x, const Axis& axis, SumDtype result,
                        const std::string& where, Direction direction) {
  const WideScope addends_are_wider;  // debug.check_dtypes: as the policy says
  const at::ScalarType wire = wire_dtype(x, axis);
  const at::Tensor addend = x.to(wire).contiguous();
  const at::Tensor sum = at::empty(x.sizes(), x.options().dtype(sum_dtype(wire)));
  run(axis, comm::Kind::kAllReduce, comm::AllReduce{addend, sum}, where, direction);
  return sum.to(result.value_or(x.scalar_type()));
}

at::Tensor exchange_gather(const at::Tensor& part, const Axis& axis, const Shard& shard,
                           const std::string& where, Direction direction) {
  const std::int64_t total = shard.total.value_or(part.size(shard.dim) * axis.size);
  check_part(part, part.sizes(), axis, shard.dim, total, where);
  const Layout layout = layout_of(part, shard.dim, total, axis);
  const std::int64_t slice = layout.outer * layout.largest * layout.inner;
  const at::Tensor buffer = at::empty({axis.size * slice}, part.options());
  const auto place = [&](int rank) {
    const std::int64_t size = layout::part_of(total, axis.size, rank).size();
    return buffer.narrow(0, rank * slice, layout.outer * size * layout.inner)
        .view(with_dim(part, shard.dim, size));
  };
  place(axis.rank).copy_(part);
  if (!layout.even(axis)) {
    const std::int64_t own = part.numel();
    buffer.narrow(0, axis.rank * slice + own, slice - own).zero_();
  }
  run(axis, comm::Kind::kAllGather, comm::AllGather{buffer}, where, direction);
  if (layout.outer == 1 && layout.even(axis)) return buffer.view(with_dim(part, shard.dim, total));
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < axis.size; ++rank) parts.push_back(place(rank));
  return at::cat(parts, shard.dim);
}

at::Tensor exchange_reduce_scatter(const at::Tensor& x, const Axis& axis, const Shard& shard,
                                   SumDtype result, const std::string& where, Direction direction) {
  const std::int64_t total = whole_of(x, axis, shard, where);
  const Layout layout = layout_of(x, shard.dim, total, axis);
  const std::int64_t slice = layout.outer * layout.largest * layout.inner;
  const WideScope addends_are_wider;
  const at::ScalarType wire = wire_dtype(x, axis);
  at::Tensor addends;
  if (layout.outer == 1 && layout.even(axis)) {
    addends = x.to(wire).contiguous();
  } else {
    addends = at::empty({axis.size * slice}, x.options().dtype(wire));
    if (!layout.even(axis)) addends.zero_();  // shorter parts end with padding
    for (int rank = 0; rank < axis.size; ++rank) {
      const layout::Range part = layout::part_of(total, axis.size, rank);
      addends.narrow(0, rank * slice, layout.outer * part.size() * layout.inner)
          .view(with_dim(x, shard.dim, part.size()))
          .copy_(x.narrow(shard.dim, part.begin, part.size()));
    }
  }
  const at::Tensor sum = at::empty({slice}, x.options().dtype(sum_dtype(wire)));
  run(axis, comm::Kind::kReduceScatter, comm::ReduceScatter{addends, sum}, where, direction);
  const std::int64_t own = layout::part_of(total, axis.size, axis.rank).size();
  return sum.narrow(0, 0, layout.outer * own * layout.inner)
      .view(with_dim(x, shard.dim, own))
      .to(result.value_or(x.scalar_type()));
}

struct RowsUnderWay::Issued {
  Exchange exchange;
};

RowsUnderWay::RowsUnderWay(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                           const std::string& where, Direction direction) {
  const std::int64_t sent = std::accumulate(splits.sends.begin(), splits.sends.end(), 0L);
  const std::int64_t received = std::accumulate(splits.receives.begin(), splits.receives.end(), 0L);
  TESSERA_INVARIANT(rows.size(0) == sent, where, ": ", rows.sizes(), " for ", sent, " rows");
  arriving_ = at::empty(with_dim(rows, 0, received), rows.options());
  const auto sizes = rows.sizes();
  const std::int64_t width = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  comm::AllToAll op{rows.contiguous(), splits.sends, arriving_, splits.receives};
  for (std::int64_t& count : op.sends) count *= width;
  for (std::int64_t& count : op.receives) count *= width;
  issued_ = std::make_unique<Issued>(
      Exchange(axis, comm::Kind::kAllToAll, std::move(op), where, direction));
}
RowsUnderWay::~RowsUnderWay() = default;

void RowsUnderWay::finish(const comm::Stream& stream) {
  TESSERA_INVARIANT(issued_, "rows that were waited for");
  std::exchange(issued_, nullptr)->exchange.finish(stream);
}

at::Tensor exchange_rows(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                         const std::string& where, Direction direction) {
  RowsUnderWay under_way(rows, axis, splits, where, direction);
  under_way.finish();
  return under_way.arriving();
}

std::vector<at::Tensor> exchange_rows_to_host(std::vector<at::Tensor> with, const at::Tensor& rows,
                                              const Axis& axis, const Splits& splits,
                                              const std::string& where) {
  // The work drops `rows` on a stream that does not own its memory: here it lives until the host
  // has waited.
  const at::Tensor sent = rows.contiguous();
  RowsUnderWay under_way(sent, axis, splits, where, Direction::kForward);
  const comm::Stream& reads = axis.group->host_reads();
  under_way.finish(reads);
  with.push_back(under_way.arriving());
  return comm::read_on_host(with, where, reads);
}

}  // namespace tessera::parallel
