#include "comm/backends/nccl/nccl_mail.h"

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

/// All of it is launched already.
class NcclTransfer final : public Transfer {
 public:
  /// `end` is empty where there is nothing to carry.
  NcclTransfer(std::shared_ptr<AbortFlag> abort_flag, Letter letter, Event end,
               std::shared_ptr<HostWaits> waits, NcclBackend backend)
      : Transfer(abort_flag),
        abort_flag_(std::move(abort_flag)),
        letter_(std::move(letter)),
        end_(std::move(end)),
        waits_(std::move(waits)),
        backend_(std::move(backend)) {}
  ~NcclTransfer() override {
    if (through_) return;
    try {
      come_behind_it();
    } catch (...) {
      // An error is under way already: it was not waited for.
    }
  }

 private:
  /// Makes the caller's stream wait; the host goes on.
  void finish() override {
    if (through_) return;
    check_aborted();
    come_behind_it();
    end();
  }
  bool poll() override {
    if (through_) return true;
    check_aborted();
    if (!end_.done()) return false;
    end();
    return true;
  }

  void come_behind_it() const {
    come_behind(letter_, end_, waits_.get(), [backend = backend_] { return error_of(*backend); });
  }
  void check_aborted() const {
    if (!abort_flag_->is_set()) return;
    abort_flag_->raise(to_string(letter_));
  }
  void end() {
    through_ = true;
    letter_.tensor = at::Tensor();
  }

  const std::shared_ptr<AbortFlag> abort_flag_;
  Letter letter_;
  const Event end_;
  const std::shared_ptr<HostWaits> waits_;
  const NcclBackend backend_;
  bool through_ = false;
};

class NcclMail final : public Mail {
 public:
  NcclMail(const NcclPlace& place, std::shared_ptr<HostWaits> waits)
      : Mail({place.channel.members, place.channel.self, place.device, std::move(waits)}),
        nccl_(place) {
    int number = 0;
    for (auto& backend : backends_) {
      backend = place.backends->make(
          c10::make_intrusive<c10d::PrefixStore>(concat("messages ", number++), place.store),
          rank(), size(), place.device, StreamUse::kOtherRanks);
    }
  }

  void connect(const std::set<MailRoute>& routes) override {
    for (const MailRoute& route : routes) {
      const bool sends = route.from == rank();
      if ((!sends && route.to != rank()) || !connected_.insert(route).second) continue;
      const int peer = sends ? route.to : route.from;
      const auto other = members()[static_cast<std::size_t>(peer)];
      connect_in_time(nccl_, concat("messages between ranks ", world_rank(), " and ", other),
                      [backend = backend_of(route), sends, peer, device = device()] {
                        carry(*backend, sends, peer, at::zeros({1}, at::TensorOptions(device)));
                      });
    }
  }
  bool matches_by_order() const override { return true; }
  // Over NCCL a message is launched once, whether its other end is known or not.
  bool gains_by_early_receives() const override { return false; }

 private:
  int world_rank() const { return members()[static_cast<std::size_t>(rank())]; }

  /// Of a pair, which is all that a communicator of sends and receives connects.
  const NcclBackend& backend_of(const MailRoute& route) const {
    const bool is_forward = route.direction == MailTag::Direction::kForward;
    return backends_[(is_forward ? 0U : 2U) + (route.from < route.to ? 0U : 1U)];
  }
  MailRoute route_of(const Letter& letter) const {
    return letter.sends() ? MailRoute{rank(), letter.peer, letter.tag.direction}
                          : MailRoute{letter.peer, rank(), letter.tag.direction};
  }

  std::unique_ptr<Transfer> post(Letter letter) override {
    const auto& abort_flag = nccl_.channel.abort_flag;
    if (abort_flag->is_set()) {
      abort_flag->raise(to_string(letter));
    }
    const NcclBackend& backend = backend_of(route_of(letter));
    Event end;
    if (letter.tensor.numel() > 0) {
      const Launching launching(host_waits(), work_of(letter));
      try {
        letter.posted.block(letter.stream, EventSite::kMailPost);
        const StreamScope there(letter.stream);
        carry(*backend, letter.sends(), letter.peer, letter.tensor);
      } catch (const std::exception& error) {
        throw LostRank(concat(to_string(letter), ": ", one_line(error.what())));
      }
      end.record(letter.stream, EventSite::kMailEnd);
    }
    return std::make_unique<NcclTransfer>(abort_flag, std::move(letter), std::move(end),
                                          host_waits(), backend);
  }

  /// c10d carries it on a stream of its own, which comes behind the current one; that comes behind
  /// it again.
  static void carry(c10d::ProcessGroupNCCL& backend, bool sends, int peer, at::Tensor tensor) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    constexpr int kNoTag = 0;
    const auto work =
        sends ? backend.send(tensors, peer, kNoTag) : backend.recv(tensors, peer, kNoTag);
    if (work) work->wait();  // the stream, and not the host
  }

  const NcclPlace nccl_;
  std::array<NcclBackend, 4>
      backends_;  ///< activations up and down the ranks, gradients up and down
  std::set<MailRoute> connected_;
};

}  // namespace

std::unique_ptr<Mail> open_nccl_mail(const NcclPlace& place, std::shared_ptr<HostWaits> waits) {
  return std::make_unique<NcclMail>(place, std::move(waits));
}

}  // namespace tessera::comm
