// Borders between stages: what both ends declare (tessera/pipeline.h), compared over the ranks of a
// pipeline before anything is sent.
//
// Next: messages.h, which sends by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

}  // namespace tessera::pipeline
