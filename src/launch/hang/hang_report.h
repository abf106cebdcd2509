// HangReport: why a run hangs or was lost, as a value and as text. Pure. Next: hang_finder.h, which
// makes it from the boards of the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/rank_board.h"

namespace tessera::comm {

/// A collective or a message, as reports name it.
struct NamedIssue {
  std::uint64_t what = 0;
  IssueWords words;
  std::string group;                      ///< "messages" for a message
  std::optional<std::uint64_t> sequence;  ///< none for messages
  std::optional<Pass> pass;
};
/// "all_gather of layers.3, micro-batch 0, in backward (#17 on gather of ranks 0,1)".
std::string to_string(const NamedIssue& issue);

enum class HangCause : std::uint8_t {
  kLeftOrder,  ///< issued something else than comes next
  kGone,       ///< gives no sign of life
  kComputes,   ///< lives, and waits for no rank
  kMute,       ///< lives, and did not answer
  kStore,      ///< waits in the store, where ranks open a group or meet
  kCycle,      ///< waits for ranks that wait for it
};

/// A rank for which others wait and that waits for none; or a rank that left the order.
struct HangRoot {
  int rank = 0;
  HangCause cause = HangCause::kComputes;
  std::optional<NamedIssue> should;  ///< what it should be in by the order
  std::optional<NamedIssue> issued;  ///< kLeftOrder: what it issued instead; else the last issue
  std::string how;                   ///< kLeftOrder: "skipped", "issued twice", "issued too early"
  std::int64_t since_ms = 0;         ///< time since it issued that
  int waited_for_by = 0;             ///< number of ranks
  /// For a rank without a board: what others have issued in its groups and have not seen end, the
  /// latest first.
  std::vector<NamedIssue> pending = {};
};

/// Ranks that wait in the same way.
struct HangWait {
  std::vector<int> ranks;
  NamedIssue in;
  std::vector<int> missing;  ///< ranks that have not reached it
  std::int64_t waited_ms = 0;
  bool as_ordered = false;  ///< whether it comes next by the order
  /// what they should be in, where the order says something else
  std::optional<NamedIssue> should;
};

struct HangReport {
  int ranks = 0;
  int answered = 0;
  std::vector<HangRoot> roots;  ///< the first to leave comes first
  std::vector<HangWait> waits;  ///< the longest comes first
};

/// One block of lines: each at most some hundred characters, at most some 20 of them, for any
/// number of ranks.
std::string to_string(const HangReport& report);

}  // namespace tessera::comm
