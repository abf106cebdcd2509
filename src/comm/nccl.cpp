#include "comm/nccl.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/one_line.h"
#include "comm/batch.h"
#include "comm/flight_recorder.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// What NCCL has under way for one batch, and the additions that are left.
class NcclWork : public Work {
 public:
  NcclWork(std::string what, std::vector<c10::intrusive_ptr<c10d::Work>> works,
           std::vector<std::pair<ReduceScatter, at::Tensor>> left,
           std::shared_ptr<const Poison> poison)
      : what_(std::move(what)),
        works_(std::move(works)),
        left_(std::move(left)),
        poison_(std::move(poison)) {}

  /// Makes the caller's stream wait; the host goes on.
  void wait() override {
    if (done_) return;
    poison_->check();
    try {
      for (const auto& work : works_) work->wait();
    } catch (const std::exception& error) {
      throw PeerLost(concat(what_, ": ", one_line(error.what())));
    }
    for (const auto& [op, summed] : left_) {
      if (op.into == Into::kAdd) {
        op.output.add_(summed);
      } else {
        op.output.copy_(summed);
      }
    }
    works_.clear();
    left_.clear();
    done_ = true;
  }

 private:
  std::string what_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<std::pair<ReduceScatter, at::Tensor>> left_;
  std::shared_ptr<const Poison> poison_;
  bool done_ = false;
};

class NcclGroup : public Group {
 public:
  NcclGroup(const ChannelOptions& channel, const c10::intrusive_ptr<c10d::Store>& store,
            int local_rank)
      : channel_(channel),
        device_(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)),
        log_(std::make_shared<FlightRecorder>(channel.name)) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = channel.timeout;
    backend_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, channel.self, size(), options);
    backend_->setBoundDeviceId(device_);
    channel_.board->add(log_);
  }

  int rank() const override { return channel_.self; }
  int size() const override { return static_cast<int>(channel_.members.size()); }
  const std::string& name() const override { return channel_.name; }

  std::unique_ptr<Work> issue(Batch batch) override {
    channel_.poison->check();
    check_batch(batch, size(), at::kCUDA);
    Entry entry;
    describe(batch, next_sequence_, entry);
    log_->record(batch, next_sequence_++);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<std::pair<ReduceScatter, at::Tensor>> left;
    const bool together = batch.ops.size() > 1;
    if (together) backend_->startCoalescing();
    for (const Op& op : batch.ops) works.push_back(start(op, left));
    if (together) works = {backend_->endCoalescing()};
    return std::make_unique<NcclWork>(to_string(entry), std::move(works), std::move(left),
                                      channel_.poison);
  }

 private:
  c10::intrusive_ptr<c10d::Work> start(const Op& op,
                                       std::vector<std::pair<ReduceScatter, at::Tensor>>& left) {
    if (const auto* gather = std::get_if<AllGather>(&op)) {
      at::Tensor all = gather->buffer.view(-1);
      const std::int64_t slice = all.numel() / size();
      at::Tensor mine = all.narrow(0, slice * rank(), slice);  // NCCL's in-place form
      return backend_->_allgather_base(all, mine);
    }
    if (const auto* reduce = std::get_if<ReduceScatter>(&op)) {
      at::Tensor input = reduce->input.view(-1);
      const bool direct =
          reduce->into == Into::kOverwrite && reduce->output.scalar_type() == input.scalar_type();
      at::Tensor summed =
          direct ? reduce->output.view(-1) : at::empty({reduce->output.numel()}, input.options());
      if (!direct) left.emplace_back(*reduce, summed.view(reduce->output.sizes()));
      return backend_->_reduce_scatter_base(summed, input);
    }
    if (const auto* exchange = std::get_if<AllToAll>(&op)) {
      at::Tensor input = exchange->input.view(-1);
      at::Tensor output = exchange->output.view(-1);
      auto sends = exchange->sends;
      auto receives = exchange->receives;
      return backend_->alltoall_base(output, input, receives, sends);
    }
    TESSERA_INVARIANT(std::holds_alternative<AllReduce>(op),
                      "nccl: found a message that is relayed in the memory of the host");
    const auto& all = std::get<AllReduce>(op);
    std::vector<at::Tensor> data = {all.output.defined() ? all.data.clone() : all.data};
    if (all.output.defined()) {
      left.emplace_back(ReduceScatter{all.data, all.output}, data[0].view(all.output.sizes()));
    }
    return backend_->allreduce(data);
  }

  ChannelOptions channel_;
  c10::Device device_;
  std::shared_ptr<FlightRecorder> log_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend_;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace

bool nccl_usable() { return c10::cuda::device_count() > 0; }

void require_nccl() {
  TESSERA_CHECK(nccl_usable(), ErrorKind::kUsage,
                "comm.backend: found nccl, but there is no CUDA device; use gloo");
}

std::unique_ptr<Group> make_nccl_group(const ChannelOptions& channel,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       int local_rank) {
  require_nccl();
  return std::make_unique<NcclGroup>(channel, store, local_rank);
}

}  // namespace tessera::comm
