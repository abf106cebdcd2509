#include "comm/backends/gloo/staged.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "comm/backends/gloo/gloo_p2p.h"
#include "comm/batch.h"
#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// A tensor in the host's memory. Its values are copied on the current stream.
at::Tensor staged(const at::Tensor& of, Values values) {
  at::Tensor twin = pinned_like(of);
  if (values == Values::kKept) twin.copy_(of, /*non_blocking=*/true);
  return twin;
}

/// Returns when what was launched on the stream has arrived on the host.
void wait_for_copies(const Stream& stream, const std::string& what) {
  Event copied;
  copied.record(stream, EventSite::kHostRead);
  wait_on_host(copied, what);
}

/// Work that may be destroyed before it has ended: nothing is in flight on the device then.
class StagedWork final : public Work {
 public:
  StagedWork(std::unique_ptr<Work> carried, Batch twins, Batch batch, const Stream& stream)
      : twins_(std::move(twins)),
        batch_(std::move(batch)),
        stream_(stream),
        carried_(std::move(carried)) {}

  void wait() override {
    if (!carried_) return;
    carried_->wait();
    Event end;
    {
      const StreamScope there(stream_);
      const c10::AutoGradMode no_grad(false);
      deliver(twins_, batch_);
      end.record(stream_, EventSite::kWorkEnd);
    }
    end.block(Stream::current(stream_.device()), EventSite::kWorkEnd);
    carried_.reset();
    twins_.ops.clear();
    batch_.ops.clear();
  }

 private:
  Batch twins_;
  Batch batch_;
  const Stream stream_;
  // destroyed before the memory that it writes; null: it was waited for
  std::unique_ptr<Work> carried_;
};

class StagedOp final : public PostedOp {
 public:
  StagedOp(P2POp op, std::unique_ptr<Transfer> twins, at::Tensor twin)
      : PostedOp(std::move(op)), twins_(std::move(twins)), twin_(std::move(twin)) {}

  Event finish() override {
    twins_->wait();
    return brought();
  }
  std::optional<Event> poll() override {
    if (!twins_->done()) return std::nullopt;
    return brought();
  }
  void let_go(const Stream& stream) override { end_.block(stream, EventSite::kP2PEnd); }

 private:
  /// Copies the received values to the device.
  Event brought() {
    if (twin_.defined() && !op_.sends()) {
      const StreamScope there(op_.stream);
      const c10::AutoGradMode no_grad(false);
      op_.tensor.copy_(twin_, /*non_blocking=*/true);
      end_.record(op_.stream, EventSite::kP2PEnd);
    }
    twin_.reset();
    return end_;
  }

  const std::unique_ptr<Transfer> twins_;
  at::Tensor twin_;  // on the host
  Event end_;        // the end of what was launched; empty: nothing was
};

class StagedP2P final : public P2P {
 public:
  StagedP2P(GlooP2P& host, P2PPlace place) : P2P(std::move(place)), host_(host) {}

 private:
  std::unique_ptr<Transfer> post(P2POp op) override {
    op.posted.block(op.stream, EventSite::kP2PPost);
    P2POp on_host{op.end, op.tag, op.peer, op.peer_rank, {}};
    {
      const StreamScope there(op.stream);
      const c10::AutoGradMode no_grad(false);
      on_host.tensor = staged(op.tensor, op.sends() ? Values::kKept : Values::kOverwritten);
    }
    if (op.sends()) wait_for_copies(op.stream, to_string(op));
    at::Tensor twin = on_host.tensor;
    auto twins = host_.post(std::move(on_host));
    return std::make_unique<Transfer>(
        place(), std::make_shared<StagedOp>(std::move(op), std::move(twins), std::move(twin)));
  }

  GlooP2P& host_;
};

class StagedGroup final : public Group {
 public:
  StagedGroup(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place)
      : host_(std::move(host)),
        device_(place.device),
        members_(place.ranks),
        abort_flag_(place.abort_flag) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  P2P& p2p() override {
    GlooP2P& host = host_->gloo_p2p();
    if (!p2p_) {
      p2p_ = std::make_unique<StagedP2P>(host, P2PPlace{members_, rank(), device_, abort_flag_});
    }
    return *p2p_;
  }

 private:
  std::unique_ptr<Work> start(Batch batch) override {
    require_no_p2p(p2p_.get(), name());
    check_batch(batch, size(), device_);
    Batch twins = cloned(batch, staged);
    wait_for_copies(stream(), concat(to_string(batch.label.kind), " of ", batch.label.unit));
    auto carried = host_->issue(twins);
    return std::make_unique<StagedWork>(std::move(carried), std::move(twins), std::move(batch),
                                        stream());
  }

  const std::shared_ptr<PointToPointGroup> host_;
  const at::Device device_;
  const std::vector<int> members_;
  const std::shared_ptr<AbortFlag> abort_flag_;
  std::unique_ptr<StagedP2P> p2p_;
};

}  // namespace

std::shared_ptr<Group> stage(std::shared_ptr<PointToPointGroup> host, const GroupPlace& place) {
  return std::make_shared<StagedGroup>(std::move(host), place);
}

}  // namespace tessera::comm
