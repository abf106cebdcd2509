// A program that can run: validate() has found no fault in it. Pure.
//
// A runner (runner.h) takes only this type, so that nothing unchecked runs. Next: runner.h.
#pragma once

#include <cstdint>

#include "pipeline/program.h"
#include "pipeline/schedule.h"
#include "pipeline/validate.h"

namespace tessera::pipeline {

class ValidProgram {
 public:
  /// Takes messages as lower() makes them. Errors: kConfig with the findings.
  explicit ValidProgram(const Schedule& schedule, Passes passes = Passes::kForwardAndBackward);
  /// Takes a program of a file: messages are where it says, or as lower() makes them where it has
  /// none (has_messages()); moves of parameters are where the slots need them, not where it says.
  /// Errors: as above.
  explicit ValidProgram(const Program& program, Passes passes = Passes::kForwardAndBackward);

  const Program& program() const { return program_; }
  const Schedule& schedule() const { return schedule_; }
  Passes passes() const { return passes_; }
  /// Checks for messages without tags (NCCL), where the first receive gets what was sent first.
  /// Errors: kConfig, naming a message that overtakes another one.
  void require_messages_in_order() const;
  /// Whether a rank of a program of forwards alone may wait for any of its sends at any time, and
  /// all ranks still come to their ends.
  bool may_wait_for_sends() const { return may_wait_for_sends_; }
  /// The same on ranks that run the same program.
  std::uint64_t hash() const { return hash_; }

 private:
  Schedule schedule_;
  Program program_;
  Passes passes_;
  bool may_wait_for_sends_ = false;
  std::uint64_t hash_;
};

}  // namespace tessera::pipeline
