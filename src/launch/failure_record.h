// FailureRecord: what a rank says before it leaves, to its parent if own spawn started it, and to
// the other ranks under the store's failure key. culprit() is how the parent finds the cause.
//
// Pure. Next: spawn.h, failure_report.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// How sure it is that a failure is the cause and not a consequence; the smallest is the culprit's.
enum class FailureClass : std::uint8_t {
  kKilled,   ///< died by a signal that own spawn did not send
  kPrimary,  ///< an error of its own, or an exit without one
  kNoticed,  ///< noticed that another rank was lost
};

/// Exit code of a refusal before the first step: any wrong request of a user.
inline constexpr int kRefusedCode = 2;

struct FailureRecord {
  FailureClass what = FailureClass::kPrimary;
  std::int64_t time_ns = 0;  ///< of the monotonic clock, which all processes of a host share
  int rank = 0;
  int exit_code = 1;
  std::string message;
  bool operator==(const FailureRecord&) const = default;
};

/// One line of numbers, then the message.
std::string encode(const FailureRecord& record);
/// Returns none for anything that encode() does not write.
std::optional<FailureRecord> decode_failure(const std::string& bytes);

/// "rank R: message". A message that ranks have told each other already begins with the rank that
/// said it, and may return to that rank as its own error: the rank is named once. Only this
/// function puts a rank in front of an error.
std::string of_rank(int rank, std::string_view message);

/// of_rank() of the record's rank and message.
std::string to_string(const FailureRecord& record);

/// Returns the first by time among those of the smallest class; none for an empty list.
std::optional<FailureRecord> culprit(const std::vector<FailureRecord>& failures);

std::int64_t monotonic_ns();

}  // namespace tessera::comm
