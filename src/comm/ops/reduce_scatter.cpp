#include "comm/ops/reduce_scatter.h"

#include "comm/ops/steps.h"
#include "kernels/host_sum.h"
#include "kernels/kernels.h"
#include "layout/bucket_plan.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

kernels::HostSum into_output(const ReduceScatter& op) {
  return {op.output.mutable_data_ptr(), op.output.scalar_type(), op.output.numel(),
          op.into == Into::kAdd};
}

/// Sends every other rank the slice that this other rank sums. The addends that arrive are received
/// into memory outside of the op's tensors, and added in one pass.
class ReduceScatterSteps final : public Steps {
 public:
  ReduceScatterSteps(const ReduceScatter& op, int ranks)
      : op_(op), slice_(nbytes(op.input) / ranks) {}

  void post_receives(Transfers& transfers, int /*round*/) override {
    transfers.receive_addends(slice_);
  }
  void post_sends(Transfers& transfers, int round) override {
    for_successors(transfers, [&](int peer) {
      transfers.send(peer, at_byte(op_.input, slice_ * peer), slice_, round);
    });
  }
  void combine(Transfers& transfers, int /*round*/) override {
    sum_addends(transfers, at_byte(op_.input, slice_ * transfers.self()), op_.input.scalar_type(),
                into_output(op_));
  }

 private:
  const ReduceScatter& op_;
  const std::int64_t slice_;
};

}  // namespace

OpFacts ReduceScatter::facts() const {
  return {Kind::kReduceScatter, nbytes(input), input.scalar_type(), output.scalar_type()};
}

void ReduceScatter::check(const CheckedBatch& batch) const {
  batch.require_usable(input);
  batch.require_usable(output);
  TESSERA_INVARIANT(input.numel() == batch.ranks * output.numel(), "reduce_scatter of ", batch.unit,
                    ": found ", input.numel(), " elements in and ", output.numel(), " out of ",
                    batch.ranks, " ranks");
  TESSERA_INVARIANT(kernels::can_sum(input.scalar_type(), output.scalar_type()),
                    "reduce_scatter of ", batch.unit, ": cannot add ",
                    c10::toString(input.scalar_type()), " into ",
                    c10::toString(output.scalar_type()));
}

std::int64_t ReduceScatter::sent_bytes(int ranks, int /*rank*/) const {
  return layout::sent_bytes(nbytes(input), ranks);
}

void ReduceScatter::run_alone() const {
  if (output.is_cpu()) {
    kernels::sum_host_memory({input.const_data_ptr()}, input.scalar_type(), into_output(*this));
    return;
  }
  const auto mine = input.view(output.sizes());
  into == Into::kAdd ? output.add_(mine) : output.copy_(mine);
}

std::unique_ptr<Steps> ReduceScatter::steps(int ranks, int /*rank*/) const {
  return std::make_unique<ReduceScatterSteps>(*this, ranks);
}

void ReduceScatter::run_on_devices(const std::vector<const ReduceScatter*>& ranks) {
  for (std::size_t to = 0; to < ranks.size(); ++to) {
    const at::Tensor output = ranks[to]->output.view(-1);
    const std::int64_t slice = output.numel();
    std::vector<at::Tensor> addends;
    for (const auto* one : ranks) {
      addends.push_back(one->input.view(-1)
                            .narrow(0, slice * static_cast<std::int64_t>(to), slice)
                            .to(output.device(), /*non_blocking=*/true));
    }
    kernels::sum_in_rank_order(addends, output, ranks[to]->into == Into::kAdd);
  }
}

ReduceScatter ReduceScatter::cloned(const MakeTwin& make) const {
  const Values values = into == Into::kAdd ? Values::kKept : Values::kOverwritten;
  return {make(input, Values::kKept), make(output, values), into, bucket};
}

void ReduceScatter::deliver(const ReduceScatter& to) const {
  to.output.copy_(output, /*non_blocking=*/true);
}

}  // namespace tessera::comm
