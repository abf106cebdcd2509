#include "comm/backends/nccl/nccl_mail.h"

#include <ATen/ATen.h>

#include <array>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

class NcclTransfer final : public Transfer {
 public:
  /// `work` is null where there is nothing to carry.
  NcclTransfer(std::shared_ptr<AbortFlag> abort_flag, Letter letter,
               c10::intrusive_ptr<c10d::Work> work)
      : Transfer(abort_flag),
        abort_flag_(std::move(abort_flag)),
        letter_(std::move(letter)),
        work_(std::move(work)) {}

 private:
  /// Makes the caller's stream wait; the host goes on.
  void finish() override {
    run([&] { work_->wait(); });
    end();
  }
  bool poll() override {
    bool through = true;
    run([&] { through = work_->isCompleted(); });
    if (through) finish();  // who asks may use the tensor: its stream has to know
    return through;
  }

  template <class Act>
  void run(const Act& act) {
    if (work_ == nullptr) return;
    if (abort_flag_->is_set()) throw lost(abort_flag_->why());
    try {
      act();
    } catch (const std::exception& error) {
      throw lost(one_line(error.what()));
    }
  }
  LostRank lost(const std::string& why) const {
    return LostRank(concat(to_string(letter_), ": ", why));
  }
  void end() {
    work_.reset();
    letter_.tensor = at::Tensor();
  }

  const std::shared_ptr<AbortFlag> abort_flag_;
  Letter letter_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class NcclMail final : public Mail {
 public:
  NcclMail(const ChannelOptions& channel, const c10::intrusive_ptr<c10d::Store>& store,
           c10::Device device)
      : Mail({channel.members, channel.self, device}), abort_flag_(channel.abort_flag) {
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
    c10::intrusive_ptr<c10d::Work> work;
    if (letter.tensor.numel() > 0) {
      std::vector<at::Tensor> tensors{letter.tensor};
      auto& backend = backend_of(letter);
      constexpr int kNoTag = 0;
      try {
        work = letter.sends() ? backend->send(tensors, letter.peer, kNoTag)
                              : backend->recv(tensors, letter.peer, kNoTag);
      } catch (const std::exception& error) {
        throw LostRank(concat(to_string(letter), ": ", one_line(error.what())));
      }
    }
    return std::make_unique<NcclTransfer>(abort_flag_, std::move(letter), std::move(work));
  }

  const std::shared_ptr<AbortFlag> abort_flag_;
  std::array<Backend, 4> backends_;  ///< activations up and down the ranks, gradients up and down
};

}  // namespace

std::unique_ptr<Mail> open_nccl_mail(const ChannelOptions& channel,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     c10::Device device) {
  return std::make_unique<NcclMail>(channel, store, device);
}

}  // namespace tessera::comm
