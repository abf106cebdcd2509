// What a rank says before it leaves: to its parent if own spawn started it, and to the other ranks
// under the store's failure key. And how the parent finds the culprit.
//
// Pure. Next: spawn.h, failure_report.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// How sure a failure is the cause and not a consequence; the smallest is the culprit's.
enum class FailureClass : std::uint8_t {
  kKilled,   ///< died by a signal that own spawn did not send
  kPrimary,  ///< an error of its own, or an exit without one
  kNoticed,  ///< noticed that another rank was lost
};

/// Exit code of what was refused before the first step: everything that a user asked wrongly.
inline constexpr int kRefusedCode = 2;

struct FailureRecord {
  FailureClass what = FailureClass::kPrimary;
  std::int64_t time_ns = 0;  ///< of the monotonic clock, the same for all processes of a host
  int rank = 0;
  int exit_code = 1;
  std::string message;
  bool operator==(const FailureRecord&) const = default;
};

/// One line of numbers, then the message.
std::string encode(const FailureRecord& record);
/// None for anything that encode() does not write.
std::optional<FailureRecord> decode_failure(const std::string& bytes);

/// "rank R: message". What the ranks have told each other already begins with the rank that said
/// it, and comes back to that rank as its own error: it is named once. The one place that puts a
/// rank in front of an error.
std::string of_rank(int rank, std::string_view message);

/// of_rank() of its two.
std::string to_string(const FailureRecord& record);

/// The first by time of the smallest class; none of none.
std::optional<FailureRecord> culprit(const std::vector<FailureRecord>& failures);

std::int64_t monotonic_ns();

}  // namespace tessera::comm
