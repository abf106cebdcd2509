#include "comm/backends/dry/dry.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "comm/batch.h"
#include "comm/buffer_pool.h"
#include "comm/ops/device_leases.h"
#include "comm/p2p.h"
#include "dry/allocator.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Computes an op over tensors with values as if each of `ranks` ranks sent what this rank (`self`)
/// sends.
class AsIfAllSentAlike {
 public:
  AsIfAllSentAlike(int self, int ranks) : self_(self), ranks_(ranks) {}

  void operator()(const AllGather& op) const {
    if (have_values({op.buffer})) repeat(op.buffer);
  }
  void operator()(const ReduceScatter& op) const {
    if (!have_values({op.input, op.output})) return;
    const at::Tensor part = op.input.view({ranks_, -1})[self_];
    const std::vector<at::Tensor> addends(static_cast<std::size_t>(ranks_), part);
    kernels::sum_in_rank_order(addends, op.output.view({-1}), op.into == Into::kAdd);
  }
  void operator()(const AllReduce& op) const {
    if (!have_values({op.data, op.result()})) return;
    const std::vector<at::Tensor> addends(static_cast<std::size_t>(ranks_), op.data.clone());
    kernels::sum_in_rank_order(addends, op.result(), /*adds=*/false);
  }
  void operator()(const AllToAll& op) const {
    if (!have_values({op.input, op.output})) return;
    const std::int64_t begin = sum_before(op.sends), count = op.sends[std::size_t(self_)];
    const at::Tensor own = op.input.view({-1}).narrow(0, begin, count);
    std::int64_t at = 0;
    for (const std::int64_t each : op.receives) {
      const at::Tensor to = op.output.view({-1}).narrow(0, at, each);
      each == count ? to.copy_(own) : to.zero_();
      at += each;
    }
  }
  void operator()(const Broadcast& /*op*/) const {}
  void operator()(const RelayedGather& op) const {
    const std::int64_t begin = sum_before(op.lengths), count = op.lengths[std::size_t(self_)];
    const at::Tensor own = op.bytes.narrow(0, begin, count).clone();
    std::int64_t at = 0;
    for (const std::int64_t each : op.lengths) {
      if (each == count) op.bytes.narrow(0, at, each).copy_(own);
      at += each;
    }
  }
  void operator()(const Combine& op) const {
    if (op.way == Combine::Way::kSum) op.values[0].mul_(ranks_);
  }

 private:
  static bool have_values(std::initializer_list<at::Tensor> tensors) {
    return std::ranges::none_of(tensors, dry::is_fake);
  }
  std::int64_t sum_before(const std::vector<std::int64_t>& lengths) const {
    std::int64_t sum = 0;
    for (int i = 0; i < self_; ++i) sum += lengths[static_cast<std::size_t>(i)];
    return sum;
  }
  void repeat(const at::Tensor& buffer) const {
    const at::Tensor parts = buffer.view({ranks_, -1});
    parts.copy_(parts[self_].clone().unsqueeze(0).expand_as(parts));
  }

  int self_, ranks_;
};

/// Has its tensors until it was waited for, as work of other backends does.
class DryWork final : public Work {
 public:
  explicit DryWork(Batch batch) : batch_(std::move(batch)) {}
  void wait() override { batch_.ops.clear(); }

 private:
  Batch batch_;
};

class DryPostedOp final : public PostedOp {
 public:
  using PostedOp::PostedOp;
  Event finish() override { return {}; }
  std::optional<Event> poll() override { return Event(); }
};

class DryP2P final : public P2P {
 public:
  DryP2P(P2PPlace place, const DryNotes& notes) : P2P(std::move(place)), notes_(notes) {}

 private:
  std::unique_ptr<Transfer> post(P2POp op) override {
    if (notes_.message) {
      const at::Tensor& tensor = op.tensor;
      notes_.message({to_string(op.tag), op.sends(), op.peer_rank,
                      static_cast<std::int64_t>(tensor.nbytes()), tensor.scalar_type()});
    }
    return std::make_unique<Transfer>(place(), std::make_shared<DryPostedOp>(std::move(op)));
  }

  const DryNotes notes_;
};

class DryGroup final : public Group {
 public:
  DryGroup(const GroupPlace& place, const DryNotes& notes) : place_(place), notes_(notes) {}
  int rank() const override { return place_.self(); }
  int size() const override { return static_cast<int>(place_.ranks.size()); }
  const std::string& name() const override { return place_.name; }
  bool is_dry() const override { return true; }
  P2P& p2p() override {
    if (!p2p_) {
      p2p_ = std::make_unique<DryP2P>(
          P2PPlace{place_.ranks, place_.self(), place_.device, place_.abort_flag, host_waits()},
          notes_);
    }
    return *p2p_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    place_.abort_flag->check();
    check_batch(batch, size(), place_.device);
    if (notes_.collective) {
      DryCollective noted{place_.name, size(), {}, sent_bytes(batch, size(), rank())};
      describe(batch, sequence_++, noted.entry);
      notes_.collective(noted);
    }
    const c10::AutoGradMode no_grad(false);
    if (!place_.device.is_cpu()) lease(batch);
    for (const Op& op : batch.ops) std::visit(AsIfAllSentAlike(rank(), size()), op);
    return std::make_unique<DryWork>(std::move(batch));
  }

  /// Takes and returns the blocks that NCCL would need in addition to the batch's tensors, and
  /// launches the sums that would follow.
  void lease(const Batch& batch) {
    std::vector<std::vector<at::Tensor>> leased;
    const auto take = [&](const auto& op) {
      leased.emplace_back();
      for (const DeviceLease& lease : device_leases(op, size(), rank())) {
        if (!pool_) pool_ = std::make_unique<BufferPool>(place_.device);
        leased.back().push_back(pool_->take(lease.numel, lease.dtype));
      }
    };
    for (const Op& op : batch.ops) std::visit(take, op);
    for (std::size_t i = 0; i < leased.size(); ++i) {
      if (!leased[i].empty()) sum(batch.ops[i], leased[i]);
    }
    for (auto& of_op : leased) {
      for (at::Tensor& each : of_op) pool_->recycle(std::move(each));
    }
  }
  void sum(const Op& op, const std::vector<at::Tensor>& leased) const {
    if (const auto* scatter = std::get_if<ReduceScatter>(&op)) sum_leased(*scatter, leased, size());
    if (const auto* reduce = std::get_if<AllReduce>(&op)) {
      sum_leased(*reduce, leased, size(), rank());
      if (in_two_rounds(*reduce, size())) take_gathered(*reduce, leased);
    }
  }

  const GroupPlace place_;
  const DryNotes notes_;
  std::unique_ptr<BufferPool> pool_;  ///< made when an op first needs one
  std::uint64_t sequence_ = 0;
  std::unique_ptr<P2P> p2p_;
};

class DryConnections final : public Connections {
 public:
  explicit DryConnections(DryNotes notes) : notes_(std::move(notes)) {}
  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    return std::make_shared<DryGroup>(place, notes_);
  }

 private:
  const DryNotes notes_;
};

}  // namespace

std::unique_ptr<Connections> open_dry(DryNotes notes) {
  return std::make_unique<DryConnections>(std::move(notes));
}

}  // namespace tessera::comm
