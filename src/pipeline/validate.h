// Validates a schedule, or its program with messages: reports every fault by name. Pure.
//
// It proves that each action appears once, on the rank of its stage, after what it needs; that each
// message has one send and one receive; that no rank waits for ever, even where a send ends only
// when its receive is posted; and that memory keeps to a bound. A schedule that changes the order
// of micro-batches is valid, but its sums may differ in their last bits from those of a run without
// a pipeline: that is a remark.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/program.h"
#include "pipeline/schedule.h"
#include "tessera/error.h"

namespace tessera::pipeline {

enum class Fault : std::uint8_t {
  kPair,        ///< two actions in a slot that are not an F and a B
  kUnknown,     ///< a stage or micro-batch that the schedule does not have; I, W, B of an F alone
  kPlacement,   ///< an action on another rank than its stage's
  kRepeated,    ///< an action twice, or a B and an I or W of one micro-batch
  kMissing,     ///< no F, no backward, I without W, W without I; a rank without any
  kDependency,  ///< before what it needs on its own rank
  kMessage,     ///< no send or receive, two of them, too early, too late
  kDeadlock,    ///< ranks that wait for each other
  kMemory,      ///< above a bound
};
std::string_view to_string(Fault fault);

struct Finding {
  Fault fault = Fault::kMissing;
  std::string text;  ///< one line, with rank, slot and action
};

struct Validation {
  /// More than anyone reads; a file full of faults would fill memory with them.
  static constexpr std::size_t kMostFindings = 100;

  std::size_t most = kMostFindings;  ///< the most that are kept
  std::vector<Finding> findings;     ///< the first ones
  std::int64_t more = 0;             ///< findings that were only counted
  std::vector<std::string> remarks;  ///< what is valid, but worth knowing

  bool valid() const { return findings.empty(); }

  template <class... Parts>
  void add(Fault fault, const Parts&... parts) {
    if (findings.size() >= most) {
      ++more;
      return;
    }
    findings.push_back({fault, concat(parts...)});
  }
};

/// The passes of the lists: those of a step, or of forward_only().
enum class Passes : std::uint8_t { kForwardAndBackward, kForward };

/// The order of the messages in one direction from a rank to another.
enum class MessageOrder : std::uint8_t {
  kAny,      ///< they meet by their content
  kOfSends,  ///< receives are posted in the order of sends: for a transport without tags
};

struct Limits {
  Passes passes = Passes::kForwardAndBackward;
  MessageOrder messages = MessageOrder::kAny;
  /// Forwarded micro-batches of all stages of a rank whose weight gradients have not run; no bound
  /// for a program without a backward.
  std::optional<int> live_chunks = {};
  /// Sends of a rank whose receives are not posted: with more of them it waits for one before it
  /// continues. None: it waits at the end of the step.
  std::optional<int> open_sends = {};
  /// The findings that are kept; others are counted. Without a bound there are at most a few for
  /// each step of the lists and for each stage, of one line each.
  std::size_t findings = Validation::kMostFindings;
};

/// Validates the lists and lower(schedule). Checks deadlocks and memory where nothing else is
/// wrong.
Validation validate(const Schedule& schedule, const Limits& limits = {});
/// Validates a program whose messages came from elsewhere.
Validation validate(const Program& program, const Limits& limits = {});

/// Most live chunks (Limits) of each rank. The schedule must be valid.
std::vector<int> peak_live_chunks(const Schedule& schedule);

/// The fewest open sends (Limits) with which a valid program ends: 0 where every send may block its
/// rank until the receive is posted.
int fewest_open_sends(const Program& program);

}  // namespace tessera::pipeline
