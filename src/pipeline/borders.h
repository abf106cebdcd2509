// Borders between stages: what both ends declare (tessera/pipeline.h), compared over the ranks of a
// pipeline before anything is sent; and the messages that carry it across.
//
// A message is one transfer a tensor, tagged by what it is (comm/p2p.h), so it meets its other end
// whatever else travels. Next: runner.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/p2p.h"
#include "pipeline/schedule.h"
#include "pipeline/valid_program.h"
#include "tessera/pipeline.h"

namespace tessera::comm {
class Group;
}  // namespace tessera::comm

namespace tessera::pipeline {

std::string to_string(const BoundaryTensor& tensor);  ///< "Float [2, 3] with a gradient"

/// What travels in a direction: activations; or gradients of those that have one, then what goes
/// back beside them.
std::vector<BoundaryTensor> contents(const Boundary& boundary, Direction direction);

/// Errors: kContract, naming the first tensor that is not as declared.
void require_as_declared(const Tensors& found, const std::vector<BoundaryTensor>& declared,
                         const char* what);

/// The same, as messages name it.
comm::P2PTag::Direction p2p_direction(Direction direction);

/// What the stages of one rank declare for each micro-batch of a step.
class Borders {
 public:
  /// `stages`: of the rank, ascending.
  Borders(const Schedule& schedule, std::vector<int> ids, const std::vector<Stage*>& stages);

  /// `stage`: among those of the rank.
  const Boundary& before(std::size_t stage, int micro_batch) const {
    return before_[at(stage, micro_batch)];
  }
  const Boundary& after(std::size_t stage, int micro_batch) const {
    return after_[at(stage, micro_batch)];
  }
  /// The same in lines, for the other ranks.
  std::string in_lines() const;
  bool operator==(const Borders&) const = default;

 private:
  std::size_t at(std::size_t stage, int micro_batch) const {
    return stage * static_cast<std::size_t>(micro_batches_) + static_cast<std::size_t>(micro_batch);
  }

  int stages_ = 0;  ///< of the whole pipeline
  int micro_batches_ = 0;
  std::vector<int> ids_;
  std::vector<Boundary> before_;  ///< of the first stage empty
  std::vector<Boundary> after_;   ///< of the last stage empty
};

/// What the ranks of a pipeline have agreed on last.
class Agreement {
 public:
  /// All ranks run the same program, and the two ends of each border declare the same. One exchange
  /// of 24 bytes, and of all declarations where those of some rank have changed. Returns the largest
  /// of what the ranks propose as the number of the step. Collective; `group` is null where there is
  /// one rank. Errors, on every rank: kConfig for another program; kContract naming stage, tensor
  /// and what both ends declare.
  std::uint64_t renew(comm::Group* group, const ValidProgram& program, const Borders& borders,
                      std::uint64_t step);

 private:
  std::optional<Borders> agreed_;
};

/// Of one step, between a rank of a pipeline and its neighbours: receives that are posted, sends
/// that are under way, and the memory that both need.
class Messages {
 public:
  /// `step`: different from that of all others that went through `mail`, the same on all its ranks.
  Messages(comm::P2P& p2p, std::uint64_t step, at::Device device)
      : p2p_(p2p), step_(step), device_(device) {}

  /// Whether receives are better posted before the list asks for them.
  bool gain_by_early_receives() const { return p2p_.gains_by_early_receives(); }
  /// `from`, `to`: ranks of the p2p.
  void post(const HandOver& what, int from, const std::vector<BoundaryTensor>& expected);
  /// Of a receive that was posted. Errors: kComm.
  Tensors wait_for(const HandOver& what);
  /// Keeps the tensors until they are sent.
  void send(const HandOver& what, int to, Tensors tensors);
  /// Until it is sent, if it is under way. Errors: kComm.
  void wait_for_send(const HandOver& what);
  /// Lets go of what has been sent, once that may be a megabyte or many messages. Does not wait.
  /// Errors: kComm.
  void let_go();
  /// Whether a rank that holds so many sends, of so many bytes, asks which of them are through. Over
  /// Gloo a thread finds that out, and its waking costs more than a small message does: an F or B of
  /// empty stages took 350 us with it and 100 without.
  static bool are_worth_asking(std::size_t sends, std::size_t bytes);
  /// Until so many are under way at most. `waiting` is told of each before it is waited for. Errors:
  /// kComm.
  template <class Waiting>
  void wait_for_sends(std::size_t most, const Waiting& waiting) {
    while (sends_.size() > most) {
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

  comm::P2PTag tag(const HandOver& what, std::size_t index) const;
  static void wait(const Open& open);

  comm::P2P& p2p_;
  const std::uint64_t step_;
  const at::Device device_;
  std::map<HandOver, Open> receives_;
  std::deque<Open> sends_;
};

}  // namespace tessera::pipeline
