#include "pipeline/messages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/error.h"

namespace tessera::pipeline {

comm::MailTag Messages::tag(const HandOver& what, std::size_t index) const {
  using MailDirection = comm::MailTag::Direction;
  const auto direction =
      what.direction == Direction::kForward ? MailDirection::kForward : MailDirection::kBackward;
  return {step_, direction, what.from, what.micro_batch, static_cast<std::int32_t>(index)};
}

void Messages::wait(const Open& open) {
  for (const auto& transfer : open.transfers) transfer->wait();
}

void Messages::post(const HandOver& what, int from, const std::vector<BoundaryTensor>& expected) {
  Open receive{what, {}, {}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto options = at::TensorOptions().dtype(expected[i].dtype).device(device_);
    const auto& into = receive.tensors.emplace_back(at::empty(expected[i].shape, options));
    receive.transfers.push_back(mail_.receive(from, tag(what, i), into));
  }
  receives_.emplace(what, std::move(receive));
}

Tensors Messages::wait_for(const HandOver& what) {
  const auto found = receives_.find(what);
  TESSERA_INVARIANT(found != receives_.end(), "no receive is posted of the ", to_string(what));
  wait(found->second);
  Tensors tensors = std::move(found->second.tensors);
  receives_.erase(found);
  return tensors;
}

void Messages::send(const HandOver& what, int to, Tensors tensors) {
  Open sent{what, std::move(tensors), {}};
  for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
    sent.transfers.push_back(mail_.send(to, tag(what, i), sent.tensors[i]));
  }
  sends_.push_back(std::move(sent));
}

void Messages::let_go() {
  std::erase_if(sends_, [](const Open& sent) {
    return std::ranges::all_of(sent.transfers,
                               [](const auto& transfer) { return transfer->done(); });
  });
}

}  // namespace tessera::pipeline
