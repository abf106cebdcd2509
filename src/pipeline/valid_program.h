// A program that can run: validate() has found nothing against it. Pure.
//
// What a runner takes (runner.h), so that nothing unchecked is run. Next: runner.h.
#pragma once

#include <cstdint>

#include "pipeline/program.h"
#include "pipeline/schedule.h"
#include "pipeline/validate.h"

namespace tessera::pipeline {

class ValidProgram {
 public:
  /// With messages as lower() has them. Errors: kConfig with the findings.
  explicit ValidProgram(const Schedule& schedule, Passes passes = Passes::kForwardAndBackward);
  /// Of a file: messages stand where it says, or as lower() has them where it has none
  /// (has_messages()); moves of parameters where the slots ask for them, whatever it says. Errors:
  /// as above.
  explicit ValidProgram(const Program& program, Passes passes = Passes::kForwardAndBackward);

  const Program& program() const { return program_; }
  const Schedule& schedule() const { return schedule_; }
  Passes passes() const { return passes_; }
  /// For messages without tags (NCCL): the first receive gets what was sent first, whatever it is.
  /// Errors: kConfig, naming a message that overtakes another one.
  void require_messages_in_order() const;
  /// Of forwards alone, in which nothing comes back that would hold up a rank: whether it may wait
  /// for any of its sends at any time, and all ranks come to their ends all the same.
  bool may_wait_for_sends() const { return may_wait_for_sends_; }
  /// Ranks that run the same have the same.
  std::uint64_t hash() const { return hash_; }

 private:
  Schedule schedule_;
  Program program_;
  Passes passes_;
  bool may_wait_for_sends_ = false;
  std::uint64_t hash_;
};

}  // namespace tessera::pipeline
