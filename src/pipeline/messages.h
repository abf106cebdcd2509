// Messages of one step between a rank of a pipeline and its neighbours: receives that are posted,
// sends that are under way, and the memory that both need.
//
// A message is one transfer a tensor, tagged by what it is (comm/mail.h), so it meets its other end
// whatever else travels. Next: runner.h.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/mail.h"
#include "pipeline/schedule.h"
#include "tessera/pipeline.h"

namespace tessera::pipeline {

class Messages {
 public:
  /// `step`: different from that of all others that went through `mail`, the same on all its ranks.
  Messages(comm::Mail& mail, std::uint64_t step, at::Device device)
      : mail_(mail), step_(step), device_(device) {}

  /// `from`, `to`: ranks of the mail.
  void post(const HandOver& what, int from, const std::vector<BoundaryTensor>& expected);
  /// Of a receive that was posted. Errors: kComm.
  Tensors wait_for(const HandOver& what);
  /// Keeps the tensors until they are sent.
  void send(const HandOver& what, int to, Tensors tensors);
  /// Lets go of what has been sent. Does not wait. Errors: kComm.
  void let_go();
  /// Until all is sent. `waiting` is told of each before it is waited for. Errors: kComm.
  template <class Waiting>
  void wait_for_sends(const Waiting& waiting) {
    while (!sends_.empty()) {
      waiting(sends_.front().what);
      wait(sends_.front());
      sends_.pop_front();
    }
  }

 private:
  struct Open {
    HandOver what;
    Tensors tensors;
    std::vector<std::unique_ptr<comm::Transfer>> transfers;  ///< end before their memory
  };

  comm::MailTag tag(const HandOver& what, std::size_t index) const;
  static void wait(const Open& open);

  comm::Mail& mail_;
  const std::uint64_t step_;
  const at::Device device_;
  std::map<HandOver, Open> receives_;
  std::deque<Open> sends_;
};

}  // namespace tessera::pipeline
