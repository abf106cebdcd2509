#include "pipeline/valid_program.h"

#include <string>

#include "base/hash.h"
#include "pipeline/schedule_csv.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// More findings than anybody reads at once; `tessera schedule FILE` has all.
constexpr std::size_t kMostNamed = 10;

void require_valid(const Validation& validation) {
  if (validation.valid()) return;
  std::string text;
  std::size_t named = 0;
  for (const auto& finding : validation.findings) {
    if (named++ == kMostNamed) break;
    text += concat("\n  ", to_string(finding.fault), ": ", finding.text);
  }
  const auto all = static_cast<std::int64_t>(validation.findings.size()) + validation.more;
  throw Error(ErrorKind::kConfig,
              concat("pipeline schedule: found ", all, " fault", all == 1 ? "" : "s",
                     ", expected one that can run; tessera schedule FILE names all:", text));
}

/// Makes a program of the slots alone.
Program slots_of(const Schedule& schedule) {
  Program program{schedule.micro_batches, schedule.rank_of, {}};
  for (const auto& slots : schedule.slots) program.steps.emplace_back(slots.begin(), slots.end());
  return program;
}

Validation validated(const Program& program, Passes passes) {
  Limits limits;
  limits.passes = passes;
  // Without messages of its own those that follow from the slots are looked at, once these are
  // right.
  return has_messages(program) ? validate(program, limits) : validate(schedule_of(program), limits);
}

}  // namespace

ValidProgram::ValidProgram(const Program& program, Passes passes)
    : schedule_(schedule_of(program)), passes_(passes) {
  require_valid(validated(program, passes));
  program_ = has_messages(program) ? with_moves(program) : lower(schedule_);
  may_wait_for_sends_ =
      passes == Passes::kForward &&
      validate(program_, {.passes = passes, .live_chunks = {}, .open_sends = 0}).valid();
  hash_ = hash_bytes(to_csv(program_));
}

ValidProgram::ValidProgram(const Schedule& schedule, Passes passes)
    : ValidProgram(slots_of(schedule), passes) {}

void ValidProgram::require_messages_in_order() const {
  const auto in_order = validate(program_, {.passes = passes_, .messages = MessageOrder::kOfSends});
  TESSERA_CHECK(in_order.valid(), ErrorKind::kConfig,
                "pipeline schedule: ", in_order.findings.front().text,
                ": over NCCL messages have no tags; take a schedule whose messages do not overtake "
                "each other, as those of every kind");
}

}  // namespace tessera::pipeline
