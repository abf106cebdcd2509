// RankBoard: a value that says where one rank is when a run hangs or loses a rank: what it waits
// in, what its groups have issued, and in which order.
//
// The rank itself makes it before its waits end, and writes it to the store, where the rank that
// reports collects those of all ranks (collect_boards). Ranks that are killed or stopped write
// nothing: their heartbeats tell them from slow ones. hang/hang_finder.h finds the cause in the
// boards. Pure.
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
  std::string name;         ///< the group's: "gather of ranks 0,1"
  std::uint64_t count = 0;  ///< collectives so far
  bool operator==(const BoardLane&) const = default;
};

struct BoardItem {
  std::uint64_t lane = 0;
  std::uint64_t what = 0;
  std::uint64_t sequence = 0;
  std::int64_t age_ms = 0;
  Pass pass = Pass::kForward;
  bool done = false;                    ///< it was waited for, and has ended
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
  /// The number of threads that wait for other ranks, also in the store; 0: it computes.
  int threads_waiting = 0;
  std::vector<BoardWait> waits;  ///< the longest first
  std::vector<BoardLane> lanes;
  std::vector<BoardItem> items;  ///< the oldest first
  std::map<std::uint64_t, IssueWords> names;
  bool operator==(const RankBoard&) const = default;

  const BoardLane* lane(std::uint64_t hash) const;
};

/// The number of items on each board of so many ranks: all boards together have a few MiB.
std::size_t items_for(int ranks);
/// A PeerWait with the time that it has lasted.
struct TimedWait {
  PeerWait wait;
  std::chrono::steady_clock::time_point since;
};
/// `lanes` are those of groups whose collectives are in `log`.
RankBoard make_board(int rank, int threads_waiting, const std::vector<TimedWait>& waits,
                     std::vector<BoardLane> lanes, const OrderLog& log, std::size_t most_items);

using Whats = std::vector<std::uint64_t>;
/// Returns what the earlier elements of `whats` predict for the place `at`, by the earlier place
/// with the longest equal context before it; 0: no prediction.
std::uint64_t expected_at(const Whats& whats, std::size_t at);
/// Returns that earlier place; 0: there is none.
std::size_t place_like(const Whats& whats, std::size_t at);
/// Returns the items of some lanes, in order.
std::vector<const BoardItem*> items_of(const RankBoard& board,
                                       const std::set<std::uint64_t>& lanes);
Whats whats_of(const std::vector<const BoardItem*>& items);
/// Whether the rank has reached what another one waits for.
bool has_issued(const RankBoard& board, const BoardWait& wait);
/// Returns the `what` that the rank for which `wait` waits has to issue.
std::uint64_t is_for(const BoardWait& wait);
/// Returns the rank's next place that equals `one`, in the earlier step of the lane of `one` that
/// is most like its latest issues there; its number of items where there is none. The first issues
/// have the least context, but a lane has one order, even if threads issue in others.
std::size_t next_of(const RankBoard& board, const BoardItem& one);
/// Returns the place at which a rank that does the same as the one that is waited for has issued
/// what `wait` is for.
std::optional<std::size_t> place_of(const RankBoard& board, const BoardWait& wait);

std::string encode(const RankBoard& board);
/// Returns none for anything that encode() does not write: another process has written it.
std::optional<RankBoard> decode_board(const std::string& text);

/// Returns the world ranks in the name of a group ("gather of ranks 0,1", "... 0 to 1020 by 4"),
/// and what is before them; no ranks where the name has none.
std::vector<int> ranks_in(const std::string& group);
std::string purpose_in(const std::string& group);

/// The boards of all ranks.
struct Boards {
  int ranks = 0;                  ///< of the World
  int reporter = 0;               ///< the rank that collects them
  std::vector<RankBoard> boards;  ///< ascending
  std::vector<int> silent;        ///< ranks without a board and without a heartbeat meanwhile
  std::vector<int> mute;          ///< ranks without a board, but with heartbeats
};

namespace store_key {
std::string board(int epoch, int rank);
std::string boards_read(int epoch);  ///< set when the boards of that epoch are no longer read
}  // namespace store_key

/// Asks for the boards of all ranks until they are there, or `time` is over. `own` is the
/// reporter's. Errors: those of the store.
Boards collect_boards(WatchedStore& store, int epoch, int ranks, const RankBoard& own,
                      std::chrono::milliseconds time, std::chrono::milliseconds pause);

}  // namespace tessera::comm
