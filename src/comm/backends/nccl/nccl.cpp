#include "comm/backends/nccl/nccl.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text/printable.h"
#include "comm/backends/gloo/point_to_point.h"
#include "comm/backends/nccl/nccl_mail.h"
#include "comm/batch.h"
#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// What NCCL has under way for one batch, and the additions that are left.
struct UnderWay {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::pair<ReduceScatter, at::Tensor>> left;
  Stream stream;  ///< the group's
  std::shared_ptr<const FlightRecorder> log;
  std::uint64_t sequence = 0;  ///< in the log
  std::shared_ptr<HostWaits> waits;
};

class NcclWork : public Work {
 public:
  NcclWork(std::string what, UnderWay under_way, std::shared_ptr<const AbortFlag> abort_flag)
      : what_(std::move(what)),
        under_way_(std::move(under_way)),
        abort_flag_(std::move(abort_flag)) {}

  /// Makes the caller's stream wait; the host goes on.
  void wait() override {
    if (done_) return;
    abort_flag_->check();
    Event end;
    {
      // Where the memory of sums was allocated, which is free as soon as they are let go.
      const StreamScope there(under_way_.stream);
      finish();
      end.record(under_way_.stream, EventSite::kWorkEnd);
    }
    if (under_way_.waits) {
      under_way_.waits->waited_for(
          [log = under_way_.log, sequence = under_way_.sequence] {
            return log->wait_for(sequence, -1);
          },
          end);
    }
    end.block(Stream::current(under_way_.stream.device()), EventSite::kWorkEnd);
    done_ = true;
  }

 private:
  void finish() {
    try {
      for (const auto& work : under_way_.works) work->wait();
    } catch (const std::exception& error) {
      throw LostRank(concat(what_, ": ", one_line(error.what())));
    }
    for (const auto& [op, summed] : under_way_.left) {
      if (op.into == Into::kAdd) {
        op.output.add_(summed);
      } else {
        op.output.copy_(summed);
      }
    }
    under_way_.works.clear();
    under_way_.left.clear();
  }

  std::string what_;
  UnderWay under_way_;
  std::shared_ptr<const AbortFlag> abort_flag_;
  bool done_ = false;
};

class NcclGroup : public Group {
 public:
  NcclGroup(const ChannelOptions& channel, const c10::intrusive_ptr<c10d::Store>& store,
            at::Device device)
      : channel_(channel),
        store_(store),
        device_(device),
        log_(std::make_shared<FlightRecorder>(channel.name)) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = channel.timeout;
    backend_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, channel.self, size(), options);
    backend_->setBoundDeviceId(device_);
    channel_.board->add(log_);
  }
  ~NcclGroup() override { channel_.board->remove(*log_); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const override { return channel_.self; }
  int size() const override { return static_cast<int>(channel_.members.size()); }
  const std::string& name() const override { return channel_.name; }

  Mail& mail() override {
    if (!mail_) mail_ = open_nccl_mail(channel_, store_, device_);
    return *mail_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    require_no_mail(mail_.get(), name());
    channel_.abort_flag->check();
    check_batch(batch, size(), device_);
    Entry entry;
    describe(batch, next_sequence_, entry);
    log_->record(batch, next_sequence_);
    UnderWay begun{{}, {}, stream(), log_, next_sequence_++, host_waits()};
    const bool together = batch.ops.size() > 1;
    if (together) backend_->startCoalescing();
    for (const Op& op : batch.ops) begun.works.push_back(std::visit(Start{*this, begun.left}, op));
    if (together) begun.works = {backend_->endCoalescing()};
    return std::make_unique<NcclWork>(to_string(entry), std::move(begun), channel_.abort_flag);
  }

  using Started = c10::intrusive_ptr<c10d::Work>;

  /// NCCL's call for each op.
  struct Start {
    const NcclGroup& group;
    std::vector<std::pair<ReduceScatter, at::Tensor>>& left;

    Started operator()(const AllGather& op) const {
      at::Tensor all = op.buffer.view(-1);
      const std::int64_t slice = all.numel() / group.size();
      at::Tensor mine = all.narrow(0, slice * group.rank(), slice);  // NCCL's in-place form
      return group.backend_->_allgather_base(all, mine);
    }
    Started operator()(const ReduceScatter& op) const {
      at::Tensor input = op.input.view(-1);
      const bool direct =
          op.into == Into::kOverwrite && op.output.scalar_type() == input.scalar_type();
      at::Tensor summed =
          direct ? op.output.view(-1) : at::empty({op.output.numel()}, input.options());
      if (!direct) left.emplace_back(op, summed.view(op.output.sizes()));
      return group.backend_->_reduce_scatter_base(summed, input);
    }
    Started operator()(const AllToAll& op) const {
      at::Tensor input = op.input.view(-1);
      at::Tensor output = op.output.view(-1);
      auto sends = op.sends;
      auto receives = op.receives;
      return group.backend_->alltoall_base(output, input, receives, sends);
    }
    Started operator()(const AllReduce& op) const {
      std::vector<at::Tensor> data = {op.output.defined() ? op.data.clone() : op.data};
      if (op.output.defined()) {
        left.emplace_back(ReduceScatter{op.data, op.output}, data[0].view(op.output.sizes()));
      }
      return group.backend_->allreduce(data);
    }
    Started operator()(const Broadcast& op) const {
      std::vector<at::Tensor> data = {op.data};
      c10d::BroadcastOptions from;
      from.rootRank = op.source;
      return group.backend_->broadcast(data, from);
    }
    Started operator()(const RelayedGather&) const { return refuse(); }
    Started operator()(const Combine&) const { return refuse(); }

    [[noreturn]] static Started refuse() {
      throw Error(ErrorKind::kInternal,
                  "nccl: found a message that is relayed in the memory of the host");
    }
  };

  ChannelOptions channel_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::Device device_;
  std::shared_ptr<FlightRecorder> log_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend_;
  std::uint64_t next_sequence_ = 0;
  std::unique_ptr<Mail> mail_;
};

class NcclConnections final : public Connections {
 public:
  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    meet_on_board(*place.board, [&] {
      place.store->meet(concat("group ", place.name), place.rank, place.ranks,
                        place.options.init_timeout, *place.abort_flag);
    });
    return std::make_shared<NcclGroup>(
        channel_options(place),
        place.store->for_group(concat("nccl/", place.name), place.abort_flag), place.device);
  }
  void require_recovery() const override {
    throw Error(ErrorKind::kUsage, "recover: not with NCCL; start the run anew");
  }
};

}  // namespace

bool nccl_usable() { return c10::cuda::device_count() > 0; }

std::unique_ptr<Connections> open_nccl(const LaunchEnvironment& /*launch*/) {
  TESSERA_CHECK(nccl_usable(), ErrorKind::kUsage,
                "comm.backend: found nccl, but there is no CUDA device; use gloo");
  return std::make_unique<NcclConnections>();
}

}  // namespace tessera::comm
