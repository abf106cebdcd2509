// Borders between stages: what both ends declare (tessera/pipeline.h), compared over the ranks of a
// pipeline before anything is sent; and the messages that cross them.
//
// A message is one transfer a tensor, tagged by its content (comm/p2p.h), so it meets its other end
// in any order of transfers. Next: runner.h.
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

/// Returns the tensors of a message in that direction: activations; or the gradients of those that
/// have one, followed by those that a stage declares in addition.
std::vector<BoundaryTensor> contents(const Boundary& boundary, Direction direction);

/// Checks tensors against their declaration. Errors: kContract, naming the first tensor that
/// differs.
void require_as_declared(const Tensors& found, const std::vector<BoundaryTensor>& declared,
                         const char* what);

/// The direction as messages name it.
comm::P2PTag::Direction p2p_direction(Direction direction);

/// The declarations of one rank's stages for each micro-batch of a step.
class Borders {
 public:
  /// `stages` are those of the rank, ascending.
  Borders(const Schedule& schedule, std::vector<int> ids, const std::vector<Stage*>& stages);

  /// `stage` is one of the rank's.
  const Boundary& before(std::size_t stage, int micro_batch) const {
    return before_[at(stage, micro_batch)];
  }
  const Boundary& after(std::size_t stage, int micro_batch) const {
    return after_[at(stage, micro_batch)];
  }
  /// The declarations as lines of text, for the other ranks.
  std::string in_lines() const;
  bool operator==(const Borders&) const = default;

 private:
  std::size_t at(std::size_t stage, int micro_batch) const {
    return stage * static_cast<std::size_t>(micro_batches_) + static_cast<std::size_t>(micro_batch);
  }

  int stages_ = 0;  ///< of the whole pipeline
  int micro_batches_ = 0;
  std::vector<int> ids_;
  std::vector<Boundary> before_;  ///< empty for the first stage
  std::vector<Boundary> after_;   ///< empty for the last stage
};

/// The last agreement of the ranks of a pipeline.
class Agreement {
 public:
  /// Checks that all ranks run the same program, and that the two ends of each border declare the
  /// same. Takes one exchange of 24 bytes, and one of all declarations where those of some rank
  /// have changed. Returns the largest of the step numbers that the ranks propose. Collective;
  /// `group` is null where there is one rank. Errors, on every rank: kConfig for another program;
  /// kContract naming stage, tensor and what both ends declare.
  std::uint64_t renew(comm::Group* group, const ValidProgram& program, const Borders& borders,
                      std::uint64_t step);

 private:
  std::optional<Borders> agreed_;
};

/// The messages of one step between a rank of a pipeline and its neighbours: receives that are
/// posted, sends that are in flight, and the memory of both.
class Messages {
 public:
  /// `step` differs from that of all other messages that went through `p2p`, and is the same on all
  /// its ranks.
  Messages(comm::P2P& p2p, std::uint64_t step, at::Device device)
      : p2p_(p2p), step_(step), device_(device) {}

  /// Whether receives should be posted before the list asks for them.
  bool gain_by_early_receives() const { return p2p_.gains_by_early_receives(); }
  /// `from` and `to` are ranks within the P2P's group.
  void post(const HandOver& what, int from, const std::vector<BoundaryTensor>& expected);
  /// Waits for a receive that was posted. Errors: kComm.
  Tensors wait_for(const HandOver& what);
  /// Keeps the tensors until they are sent.
  void send(const HandOver& what, int to, Tensors tensors);
  /// Waits until it is sent, if it is in flight. Errors: kComm.
  void wait_for_send(const HandOver& what);
  /// Frees what has been sent, once that may be a megabyte or many messages. Does not wait. Errors:
  /// kComm.
  void let_go();
  /// Whether a rank that holds so many sends, of so many bytes, asks which of them have ended. Over
  /// Gloo a thread finds that out, and waking it costs more than a small message does: an F or B of
  /// empty stages took 350 us with it and 100 without.
  static bool are_worth_asking(std::size_t sends, std::size_t bytes);
  /// Waits until at most so many are in flight. Calls `waiting` before each wait. Errors: kComm.
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
