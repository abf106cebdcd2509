// OrderLog: the order in which one rank has lately issued collectives and messages, over all of its
// groups. It is long enough to hold the step before this one, which tells what comes next.
//
// Written at every collective and message: a few numbers each. Text is made when a rank hangs or is
// lost, for its board (rank_board.h). Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"

namespace tessera::comm {

/// Returns `fingerprint` of a collective, mixed with the purpose of its group: the same in every
/// step and in groups of other ranks that do the same.
constexpr std::uint64_t what_of(std::uint64_t fingerprint, std::uint64_t purpose) {
  return fingerprint + purpose * 0x9e3779b97f4a7c15ULL;
}
/// Returns the other end of a message: `what` of a send is odd, that of its receive is one less.
constexpr std::uint64_t other_end(std::uint64_t what) { return what ^ 1U; }

/// Names what was issued, as text.
struct IssueWords {
  std::string op;    ///< "all_gather", "send of activations"
  std::string unit;  ///< "layers.3", "stage 1"
  std::uint32_t micro_batch = 0;
  bool operator==(const IssueWords&) const = default;
};

/// Something issued, kept so that text can be made of it later. Threads: any.
class Issue {
 public:
  virtual ~Issue() = default;
  virtual IssueWords words() const = 0;

 protected:
  Issue() = default;
  Issue(const Issue&) = default;
  Issue& operator=(const Issue&) = default;
};

/// Whether something is issued while a backward runs.
enum class Pass : std::uint8_t { kForward, kBackward };

/// One collective, or one end of a message.
struct LoggedIssue {
  std::uint64_t lane = 0;  ///< hash of the group's name; kMessageLane for a message
  std::uint64_t what = 0;  ///< what_of(); a message's is even or odd
  /// within its group; for a message a hash that is the same at both ends
  std::uint64_t sequence = 0;
  std::chrono::steady_clock::time_point time;
  Pass pass = Pass::kForward;
  bool done = false;                    ///< it was waited for, and has ended
  std::uint64_t issued_until_done = 0;  ///< the rank's later issues in all groups
};
/// The lane of all messages of a rank.
inline constexpr std::uint64_t kMessageLane = 1;

/// Threads: any.
class OrderLog {
 public:
  /// Returns its number. `make` returns the shared_ptr<const Issue>; it is called where `what` is
  /// new.
  template <class Make>
  std::uint64_t note(const LoggedIssue& one, const Make& make) {
    const base::Lock lock(mutex_);
    ring_[count_ % ring_.size()] = one;
    if (issues_.size() >= kMostNames && !issues_.contains(one.what)) issues_.clear();
    if (const auto [place, is_new] = issues_.try_emplace(one.what); is_new) place->second = make();
    return count_++;
  }
  /// Notes that the one with this number has ended.
  void done(std::uint64_t number) {
    const base::Lock lock(mutex_);
    if (number < first_ || number >= count_ || count_ - number > ring_.size()) return;
    ring_[number % ring_.size()].done = true;
    ring_[number % ring_.size()].issued_until_done = count_ - number - 1;
  }
  void clear();
  /// Returns the last ones, at most `most`, the oldest first.
  std::vector<LoggedIssue> latest(std::size_t most) const;
  std::optional<IssueWords> words(std::uint64_t what) const;

 private:
  static constexpr std::size_t kKept = 4096;
  static constexpr std::size_t kMostNames = 4096;
  mutable base::Mutex mutex_;
  std::vector<LoggedIssue> ring_ TESSERA_GUARDED_BY(mutex_) = std::vector<LoggedIssue>(kKept);
  std::uint64_t count_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t first_ TESSERA_GUARDED_BY(mutex_) = 0;  // after the last clear()
  std::unordered_map<std::uint64_t, std::shared_ptr<const Issue>> issues_
      TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::comm
