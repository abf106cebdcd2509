// WaitBoard: who of this rank is waiting for other ranks, and what its groups have issued lately.
//
// Written at every collective (cheap: no text is made), read by the failure watch when a wait takes
// long: ranks that wait for each other in different orders are found by comparing what they issued
// ([Note: failure]). Also the handle by which a poisoned World ends waits. Next: failure_watch.h.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/batch.h"

namespace tessera::comm {

/// The last entries of one group on one rank. Threads: any.
class IssueLog {
 public:
  IssueLog(std::string group, std::vector<int> members)
      : group_(std::move(group)), members_(std::move(members)) {}
  std::uint64_t record(const Batch& batch, std::uint64_t sequence);  ///< returns the fingerprint
  void clear();
  /// One line an entry: group, sequence, fingerprint, text, with tabs between.
  std::string lines() const;
  const std::vector<int>& members() const { return members_; }

 private:
  std::string group_;
  std::vector<int> members_;
  mutable std::mutex mutex_;
  std::array<Entry, 64> ring_;
  std::uint64_t count_ = 0;
};

/// "rank 0 issues A but rank 1 issues B (group G)" for the first entry in which two ranks' lines
/// differ.
std::optional<std::string> find_disagreement(int rank, const std::string& lines, int other,
                                             const std::string& other_lines);

/// Something that a thread waits in.
class Blocked {
 public:
  virtual ~Blocked() = default;
  virtual void abort() = 0;  ///< makes the wait throw; any thread
};

/// Threads: any.
class WaitBoard {
 public:
  void enter(Blocked& wait);
  void leave(Blocked& wait);
  void abort_all();
  /// How long the oldest wait has taken; none when nothing waits.
  std::optional<std::chrono::milliseconds> longest_wait() const;

  void add(std::shared_ptr<IssueLog> log);
  std::string lines() const;
  /// World ranks that share a group with this one.
  std::vector<int> peers() const;

 private:
  struct Item {
    Blocked* wait;
    std::chrono::steady_clock::time_point since;
  };
  mutable std::mutex mutex_;
  std::vector<Item> waits_;
  std::vector<std::shared_ptr<IssueLog>> logs_;
};

/// Stands on the board while it lives.
class OnBoard {
 public:
  OnBoard(WaitBoard& board, Blocked& wait) : board_(board), wait_(wait) { board_.enter(wait_); }
  ~OnBoard() { board_.leave(wait_); }
  OnBoard(const OnBoard&) = delete;
  OnBoard& operator=(const OnBoard&) = delete;

 private:
  WaitBoard& board_;
  Blocked& wait_;
};

}  // namespace tessera::comm
