#include "comm/backends/nccl/nccl_p2p.h"

#include <ATen/ATen.h>

#include <array>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text/printable.h"
#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// An end that was launched completely.
class Launched final : public PostedOp {
 public:
  /// `end` is empty where there is nothing to carry.
  Launched(P2POp op, Event end, const P2PPlace& place, NcclBackend backend)
      : PostedOp(std::move(op)),
        end_(std::move(end)),
        abort_flag_(place.abort_flag),
        waits_(place.waits),
        backend_(std::move(backend)) {}

  Event finish() override {
    check_aborted();
    return end_;
  }
  std::optional<Event> poll() override {
    check_aborted();
    return end_;
  }
  void let_go(const Stream& /*stream*/) override { order_after(op_, end_, waits_.get(), error()); }
  std::function<std::string()> error() const override {
    return [backend = backend_] { return error_of(*backend); };
  }

 private:
  void check_aborted() const {
    if (abort_flag_->is_set()) abort_flag_->raise(to_string(op_));
  }

  const Event end_;
  const std::shared_ptr<AbortFlag> abort_flag_;
  const std::shared_ptr<HostWaits> waits_;
  const NcclBackend backend_;
};

class NcclP2P final : public P2P {
 public:
  NcclP2P(const NcclPlace& place, std::shared_ptr<HostWaits> waits)
      : P2P({place.channel.members, place.channel.self, place.device, place.channel.abort_flag,
             std::move(waits)}),
        nccl_(place) {
    int number = 0;
    for (auto& backend : backends_) {
      backend = place.backends->make(
          c10::make_intrusive<c10d::PrefixStore>(concat("messages ", number++), place.store),
          rank(), size(), place.device, StreamUse::kOtherRanks);
    }
  }

  void connect(const std::set<P2PRoute>& routes) override {
    for (const P2PRoute& route : routes) {
      const bool sends = route.from == rank();
      if ((!sends && route.to != rank()) || !connected_.insert(route).second) continue;
      const int peer = sends ? route.to : route.from;
      const auto other = place().members[static_cast<std::size_t>(peer)];
      connect_in_time(nccl_, concat("messages between ranks ", world_rank(), " and ", other),
                      [backend = backend_of(route), sends, peer, device = place().device] {
                        carry(*backend, sends, peer, at::zeros({1}, at::TensorOptions(device)));
                      });
    }
  }
  bool matches_by_order() const override { return true; }
  // Over NCCL a message is launched once, whether its other end is known or not.
  bool gains_by_early_receives() const override { return false; }

 private:
  int world_rank() const { return place().members[static_cast<std::size_t>(rank())]; }

  /// Returns the communicator of a pair, which is all that one of sends and receives connects.
  const NcclBackend& backend_of(const P2PRoute& route) const {
    const bool is_forward = route.direction == P2PTag::Direction::kForward;
    return backends_[(is_forward ? 0U : 2U) + (route.from < route.to ? 0U : 1U)];
  }
  P2PRoute route_of(const P2POp& op) const {
    return op.sends() ? P2PRoute{rank(), op.peer, op.tag.direction}
                      : P2PRoute{op.peer, rank(), op.tag.direction};
  }

  std::unique_ptr<Transfer> post(P2POp op) override {
    const NcclBackend& backend = backend_of(route_of(op));
    Event end;
    if (op.tensor.numel() > 0) {
      const Launching launching(place().waits, work_of(op));
      try {
        op.posted.block(op.stream, EventSite::kP2PPost);
        const StreamScope there(op.stream);
        carry(*backend, op.sends(), op.peer, op.tensor);
      } catch (const std::exception& error) {
        throw LostRank(concat(to_string(op), ": ", one_line(error.what())));
      }
      end.record(op.stream, EventSite::kP2PEnd);
    }
    return std::make_unique<Transfer>(
        place(), std::make_shared<Launched>(std::move(op), std::move(end), place(), backend));
  }

  /// c10d carries the message on a separate stream, which is ordered after the current one; the
  /// current stream is then ordered after that stream.
  static void carry(c10d::ProcessGroupNCCL& backend, bool sends, int peer, at::Tensor tensor) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    constexpr int kNoTag = 0;
    const auto work =
        sends ? backend.send(tensors, peer, kNoTag) : backend.recv(tensors, peer, kNoTag);
    if (work) work->wait();  // makes the stream wait, not the host
  }

  const NcclPlace nccl_;
  std::array<NcclBackend, 4>
      backends_;  ///< for activations and for gradients, each in both directions
  std::set<P2PRoute> connected_;
};

}  // namespace

std::unique_ptr<P2P> open_nccl_p2p(const NcclPlace& place, std::shared_ptr<HostWaits> waits) {
  return std::make_unique<NcclP2P>(place, std::move(waits));
}

}  // namespace tessera::comm
