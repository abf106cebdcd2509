#include "launch/hang/hang_report.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/text/printable.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kRootsShown = 6, kWaitsShown = 8, kRanksShown = 8, kPendingShown = 8;

std::string some(const std::vector<int>& ranks) {
  const std::size_t shown = std::min(ranks.size(), kRanksShown);
  std::string text =
      joined(std::vector(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(shown)));
  if (shown < ranks.size()) text += concat(" and ", ranks.size() - shown, " more");
  return concat(ranks.size() == 1 ? "rank " : "ranks ", text);
}

std::string in_seconds_of(std::int64_t ms) {
  return in_seconds(std::chrono::milliseconds(ms / 100 * 100));
}

std::string_view words_of(HangCause cause) {
  switch (cause) {
    case HangCause::kLeftOrder:
      return "left the order first";
    case HangCause::kGone:
      return "is gone or stopped: no sign of life";
    case HangCause::kComputes:
      return "computes, and waits for no rank";
    case HangCause::kMute:
      return "lives, and did not say where it is";
    case HangCause::kStore:
      return "waits in the store, for ranks that open a group or meet";
    case HangCause::kCycle:
      return "waits in a cycle";
  }
  return "";
}

/// ", or still in reduce_scatter of layers.1, layers.2, all_gather of layers.0".
std::string pending_text(const std::vector<NamedIssue>& pending) {
  std::set<std::pair<std::string, std::string>> shown;
  std::string text, op;
  for (const NamedIssue& one : pending) {
    if (shown.size() == kPendingShown || !shown.insert({one.words.op, one.words.unit}).second)
      continue;
    text += text.empty() ? ", or still in " : ", ";
    if (std::exchange(op, one.words.op) != one.words.op) text += one.words.op + " of ";
    text += one.words.unit;
  }
  return text;
}

std::string line_of(const HangRoot& root) {
  std::string text = concat("rank ", root.rank, " ", words_of(root.cause));
  if (root.cause == HangCause::kLeftOrder) {
    text += concat(" (", root.how, "): issued ", to_string(*root.issued), " ",
                   in_seconds_of(root.since_ms), " ago");
    if (root.should) text += concat(", where by the order comes ", to_string(*root.should));
    return text;
  }
  if (root.should) text += concat("; by the order it should be in ", to_string(*root.should));
  text += pending_text(root.pending);
  if (root.issued) {
    text += concat("; issued last: ", to_string(*root.issued), ", ", in_seconds_of(root.since_ms),
                   " ago");
  }
  const std::string_view waits = root.waited_for_by == 1 ? " rank waits" : " ranks wait";
  if (root.waited_for_by > 0) text += concat("; ", root.waited_for_by, waits, " for it");
  return text;
}

std::string line_of(const HangWait& wait) {
  const std::string order =
      wait.as_ordered ? ", as the order says,"
      : wait.should   ? concat(", where by the order comes ", to_string(*wait.should), ",")
                      : "";
  return concat(some(wait.ranks), wait.ranks.size() == 1 ? " is in " : " are in ",
                to_string(wait.in), order, " for ", in_seconds_of(wait.waited_ms),
                wait.missing.empty()
                    ? std::string()
                    : concat(wait.ranks.size() == 1 ? ", and waits for " : ", and wait for ",
                             some(wait.missing)));
}

}  // namespace

std::string to_string(const NamedIssue& issue) {
  std::string text = issue.words.op;
  if (!issue.words.unit.empty()) text += concat(" of ", issue.words.unit);
  if (text.empty()) text = "something that it has not issued before";
  if (!issue.group.empty()) text += concat(", micro-batch ", issue.words.micro_batch);
  if (issue.pass == Pass::kBackward) text += ", in backward";
  if (issue.sequence) text += concat(" (#", *issue.sequence, " on ", issue.group, ")");
  return text;
}

std::string to_string(const HangReport& report) {
  std::string text =
      concat("hang report: ", report.answered, " of ", report.ranks, " ranks said where they are");
  for (std::size_t i = 0; i < std::min(report.roots.size(), kRootsShown); ++i) {
    text += concat("\n  ", i == 0 ? "cause: " : "  and: ", line_of(report.roots[i]));
  }
  if (report.roots.size() > kRootsShown) {
    text += concat("\n    and: ", report.roots.size() - kRootsShown, " ranks more");
  }
  if (report.roots.empty()) text += "\n  cause: not found: no rank waits for another";
  for (std::size_t i = 0; i < std::min(report.waits.size(), kWaitsShown); ++i) {
    text += concat("\n  ", line_of(report.waits[i]));
  }
  if (report.waits.size() > kWaitsShown) {
    std::size_t ranks = 0;
    for (std::size_t i = kWaitsShown; i < report.waits.size(); ++i) {
      ranks += report.waits[i].ranks.size();
    }
    text +=
        concat("\n  ", ranks, " ranks more in ", report.waits.size() - kWaitsShown, " other waits");
  }
  return text;
}

}  // namespace tessera::comm
