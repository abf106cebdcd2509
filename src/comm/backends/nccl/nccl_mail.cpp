#include "comm/backends/nccl/nccl_mail.h"

#include <ATen/ATen.h>

#include <array>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// All of it is launched already.
class NcclTransfer final : public Transfer {
 public:
  /// `end` is empty where there is nothing to carry.
  NcclTransfer(std::shared_ptr<AbortFlag> abort_flag, Letter letter, Event end,
               std::shared_ptr<HostWaits> waits)
      : Transfer(abort_flag),
        abort_flag_(std::move(abort_flag)),
        letter_(std::move(letter)),
        end_(std::move(end)),
        waits_(std::move(waits)) {}
  ~NcclTransfer() override {
    if (through_) return;
    try {
      come_behind(letter_, end_, waits_.get());
    } catch (...) {
      // An error is under way already: it was not waited for.
    }
  }

 private:
  /// Makes the caller's stream wait; the host goes on.
  void finish() override {
    if (through_) return;
    check_aborted();
    come_behind(letter_, end_, waits_.get());
    end();
  }
  bool poll() override {
    if (through_) return true;
    check_aborted();
    if (!end_.done()) return false;
    end();
    return true;
  }

  void check_aborted() const {
    if (!abort_flag_->is_set()) return;
    throw LostRank(concat(to_string(letter_), ": ", abort_flag_->why()));
  }
  void end() {
    through_ = true;
    letter_.tensor = at::Tensor();
  }

  const std::shared_ptr<AbortFlag> abort_flag_;
  Letter letter_;
  const Event end_;
  const std::shared_ptr<HostWaits> waits_;
  bool through_ = false;
};

class NcclMail final : public Mail {
 public:
  NcclMail(const ChannelOptions& channel, const c10::intrusive_ptr<c10d::Store>& store,
           c10::Device device, std::shared_ptr<HostWaits> waits)
      : Mail({channel.members, channel.self, device, std::move(waits)}),
        abort_flag_(channel.abort_flag) {
    int number = 0;
    for (auto& backend : backends_) {
      auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = channel.timeout;
      backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
          c10::make_intrusive<c10d::PrefixStore>(concat("messages ", number++), store), rank(),
          size(), options);
      backend->setBoundDeviceId(device);
    }
  }

 private:
  using Backend = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

  /// Of a pair, which is all that a communicator of sends and receives connects.
  Backend& backend_of(const Letter& letter) {
    const bool is_forward = letter.tag.direction == MailTag::Direction::kForward;
    const bool goes_up = letter.sends() == (rank() < letter.peer);
    return backends_[(is_forward ? 0U : 2U) + (goes_up ? 0U : 1U)];
  }

  std::unique_ptr<Transfer> post(Letter letter) override {
    if (abort_flag_->is_set()) {
      throw LostRank(concat(to_string(letter), ": ", abort_flag_->why()));
    }
    Event end;
    if (letter.tensor.numel() > 0) {
      try {
        launch(letter);
      } catch (const std::exception& error) {
        throw LostRank(concat(to_string(letter), ": ", one_line(error.what())));
      }
      end.record(letter.stream, EventSite::kMailEnd);
    }
    return std::make_unique<NcclTransfer>(abort_flag_, std::move(letter), std::move(end),
                                          host_waits());
  }

  /// c10d carries it on a stream of its own, which comes behind the current one; that comes behind
  /// it again.
  void launch(const Letter& letter) {
    letter.posted.block(letter.stream, EventSite::kMailPost);
    const StreamScope there(letter.stream);
    std::vector<at::Tensor> tensors{letter.tensor};
    const auto& backend = backend_of(letter);
    constexpr int kNoTag = 0;
    const auto work = letter.sends() ? backend->send(tensors, letter.peer, kNoTag)
                                     : backend->recv(tensors, letter.peer, kNoTag);
    if (work) work->wait();  // the stream, and not the host
  }

  const std::shared_ptr<AbortFlag> abort_flag_;
  std::array<Backend, 4> backends_;  ///< activations up and down the ranks, gradients up and down
};

}  // namespace

std::unique_ptr<Mail> open_nccl_mail(const ChannelOptions& channel,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     c10::Device device, std::shared_ptr<HostWaits> waits) {
  return std::make_unique<NcclMail>(channel, store, device, std::move(waits));
}

}  // namespace tessera::comm
