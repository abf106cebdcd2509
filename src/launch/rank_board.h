// RankBoard: where one rank stands when a run hangs or loses a rank, as a value: what it waits in,
// what its groups have issued, and in which order.
//
// Made by the rank itself before its waits end, and put into the store, where the rank that reports
// collects those of all (collect_boards). Ranks that are killed or stopped say nothing: they are
// told from slow ones by their heartbeats. hang/hang_finder.h finds the cause in them. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/order_log.h"
#include "launch/peer_watch.h"

namespace tessera::comm {

struct BoardLane {
  std::uint64_t hash = 0;
  std::string name;         ///< of the group: "gather of ranks 0,1"
  std::uint64_t count = 0;  ///< collectives so far
  bool operator==(const BoardLane&) const = default;
};

struct BoardItem {
  std::uint64_t lane = 0;
  std::uint64_t what = 0;
  std::uint64_t sequence = 0;
  std::int64_t age_ms = 0;
  Pass pass = Pass::kForward;
  bool done = false;                    ///< waited for, and through
  std::uint64_t issued_until_done = 0;  ///< as LoggedIssue
  bool operator==(const BoardItem&) const = default;
};

struct BoardWait {
  std::uint64_t lane = 0;
  std::uint64_t what = 0;  ///< 0: no collective or message (the opening of a group)
  std::uint64_t sequence = 0;
  int peer = -1;  ///< as PeerWait::peer
  std::int64_t waited_ms = 0;
  Pass pass = Pass::kForward;
  std::string text;  ///< as PeerWait::text
  bool operator==(const BoardWait&) const = default;
};

struct RankBoard {
  int rank = 0;
  /// Threads that wait for other ranks, those in the store included; 0: it computes.
  int threads_waiting = 0;
  std::vector<BoardWait> waits;  ///< the longest first
  std::vector<BoardLane> lanes;
  std::vector<BoardItem> items;  ///< the oldest first
  std::map<std::uint64_t, IssueWords> names;
  bool operator==(const RankBoard&) const = default;

  const BoardLane* lane(std::uint64_t hash) const;
};

/// Of so many ranks, how many items each board has: all together stay within some MiB.
std::size_t items_for(int ranks);
/// As PeerWait, with the time that it has lasted.
struct TimedWait {
  PeerWait wait;
  std::chrono::steady_clock::time_point since;
};
/// `lanes`: of groups whose collectives are in `log`.
RankBoard make_board(int rank, int threads_waiting, const std::vector<TimedWait>& waits,
                     std::vector<BoardLane> lanes, const OrderLog& log, std::size_t most_items);

using Whats = std::vector<std::uint64_t>;
/// Returns what `whats` says of its place `at`, by the earlier place before which the most is the
/// same; 0: it says nothing.
std::uint64_t expected_at(const Whats& whats, std::size_t at);
/// That earlier place; 0: there is none.
std::size_t place_like(const Whats& whats, std::size_t at);
/// The items of some lanes, in order.
std::vector<const BoardItem*> items_of(const RankBoard& board,
                                       const std::set<std::uint64_t>& lanes);
Whats whats_of(const std::vector<const BoardItem*>& items);
/// Whether the rank has come to what another one waits for.
bool has_issued(const RankBoard& board, const BoardWait& wait);
/// What the rank that is waited for has to issue.
std::uint64_t is_for(const BoardWait& wait);
/// Where the rank came next to the same, in that earlier step of the lane of `one` that is most like
/// what it has issued there last; its number of items where it did not. What comes first has the
/// least: a lane has one order, whatever the threads that issue in others.
std::size_t next_of(const RankBoard& board, const BoardItem& one);
/// Where a rank that does the same as the one that is waited for has issued what `wait` is for.
std::optional<std::size_t> place_of(const RankBoard& board, const BoardWait& wait);

std::string encode(const RankBoard& board);
/// None for anything that encode() does not write: it comes from another process.
std::optional<RankBoard> decode_board(const std::string& text);

/// World ranks in the name of a group ("gather of ranks 0,1", "... 0 to 1020 by 4"), and what is
/// before them; no ranks where the name has none.
std::vector<int> ranks_in(const std::string& group);
std::string purpose_in(const std::string& group);

/// What all ranks said.
struct Boards {
  int ranks = 0;                  ///< of the World
  int reporter = 0;               ///< the rank that asks
  std::vector<RankBoard> boards;  ///< ascending
  std::vector<int> silent;        ///< no board, and no heartbeat while they were asked
  std::vector<int> mute;          ///< no board, though their hearts beat
};

namespace store_key {
std::string board(int epoch, int rank);
std::string boards_read(int epoch);  ///< nobody reads the boards of that epoch any more
}  // namespace store_key

/// Asks for the boards of all ranks until they are there, or `time` is over. `own`: the reporter's.
/// Errors: those of the store.
Boards collect_boards(WatchedStore& store, int epoch, int ranks, const RankBoard& own,
                      std::chrono::milliseconds time, std::chrono::milliseconds pause);

}  // namespace tessera::comm
