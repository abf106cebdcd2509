#include "launch/hang/hang_finder.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Reasons over one set of boards.
class Finder {
 public:
  explicit Finder(const Boards& boards) : boards_(boards) {
    for (const RankBoard& board : boards.boards) by_rank_[board.rank] = &board;
    report_.ranks = boards.ranks;
    report_.answered = static_cast<int>(boards.boards.size());
  }

  HangReport find() {
    find_waits();
    find_leavers();
    if (report_.roots.empty()) find_ends_of_waits();
    if (report_.roots.empty()) find_leavers_of_cycles();
    return std::move(report_);
  }

 private:
  struct Edge {
    int from;
    const BoardWait* wait;
  };

  const RankBoard* board_of(int rank) const {
    return by_rank_.contains(rank) ? by_rank_.at(rank) : nullptr;
  }

  NamedIssue named(std::uint64_t what) const {
    NamedIssue issue;
    issue.what = what;
    // Most ranks have no name for the other end of a message.
    for (const std::uint64_t each : {what, other_end(what)}) {
      for (const RankBoard& board : boards_.boards) {
        const auto found = board.names.find(each);
        if (found == board.names.end()) continue;
        issue.words = found->second;
        return issue;
      }
    }
    return issue;
  }

  NamedIssue named(const BoardItem& item, const RankBoard& by) const {
    NamedIssue issue = named(item.what);
    issue.pass = item.pass;
    const BoardLane* const lane = by.lane(item.lane);
    if (item.lane != kMessageLane) issue.sequence = item.sequence;
    if (item.lane != kMessageLane && lane != nullptr) issue.group = lane->name;
    if (item.lane == kMessageLane) issue.group = "messages";
    return issue;
  }

  NamedIssue named(const BoardWait& wait, const RankBoard& by) const {
    for (auto item = by.items.rbegin(); item != by.items.rend(); ++item) {
      if (item->lane == wait.lane && item->sequence == wait.sequence && item->what == wait.what) {
        return named(*item, by);
      }
    }
    NamedIssue issue;
    issue.words.op = wait.text;
    return issue;
  }

  /// Returns the world ranks that delay a wait.
  std::vector<int> missing(const RankBoard& board, const BoardWait& wait) const {
    std::vector<int> members;
    if (const BoardLane* lane = board.lane(wait.lane)) members = ranks_in(lane->name);
    std::vector<int> missing;
    for (const int rank : members) {
      const RankBoard* other = board_of(rank);
      if (rank != board.rank && (other == nullptr || !has_issued(*other, wait))) {
        missing.push_back(rank);
      }
    }
    // A rank that has issued it may still be the one whose data does not arrive.
    if (missing.empty() && wait.peer >= 0 && wait.peer != board.rank) missing.push_back(wait.peer);
    return missing;
  }

  void compare_with_order(const RankBoard& board, const BoardWait& wait, HangWait& one) const {
    const auto items = items_of(board, {wait.lane});
    const auto at = std::ranges::find_if(
        items, [&](const BoardItem* item) { return item->sequence == wait.sequence; });
    if (at == items.end() || wait.lane == kMessageLane) return;
    const auto expected =
        expected_at(whats_of(items), static_cast<std::size_t>(at - items.begin()));
    one.as_ordered = expected == wait.what;
    if (expected == 0 || one.as_ordered) return;
    one.should = named(expected);
    one.should->group = one.in.group;
  }

  void find_waits() {
    std::map<std::pair<std::uint64_t, std::uint64_t>, HangWait> alike;
    for (const RankBoard& board : boards_.boards) {
      if (board.waits.empty()) continue;
      const BoardWait& wait = board.waits.front();
      const auto holding = missing(board, wait);
      for (const int rank : holding) waited_for_[rank].push_back({board.rank, &wait});
      HangWait& one =
          alike[{wait.lane + (wait.lane == kMessageLane ? wait.what : 0), wait.sequence}];
      one.ranks.push_back(board.rank);
      if (one.ranks.size() == 1) {
        one.in = named(wait, board);
        compare_with_order(board, wait, one);
      }
      one.waited_ms = std::max(one.waited_ms, wait.waited_ms);
      for (const int rank : holding) {
        if (std::ranges::find(one.missing, rank) == one.missing.end()) one.missing.push_back(rank);
      }
    }
    for (auto& [key, wait] : alike) {
      std::ranges::sort(wait.missing);
      report_.waits.push_back(std::move(wait));
    }
    std::ranges::sort(report_.waits, [](const HangWait& one, const HangWait& other) {
      return std::tuple(-one.waited_ms, one.ranks.front()) <
             std::tuple(-other.waited_ms, other.ranks.front());
    });
  }

  // Leavers.

  struct Left {
    HangRoot root;
    std::int64_t age_ms;
    bool by_order;
  };

  struct LaneOfAll {
    std::map<int, std::vector<const BoardItem*>> items;
    std::map<std::uint64_t, std::map<int, std::size_t>> by_sequence;  // rank -> index into items
  };

  std::map<std::uint64_t, LaneOfAll> lanes_of_all() const {
    std::map<std::uint64_t, LaneOfAll> lanes;
    for (const RankBoard& board : boards_.boards) {
      for (const BoardItem& item : board.items) {
        LaneOfAll& lane = lanes[item.lane];
        auto& items = lane.items[board.rank];
        lane.by_sequence[item.sequence][board.rank] = items.size();
        items.push_back(&item);
      }
    }
    lanes.erase(kMessageLane);
    return lanes;
  }

  /// Finds the first number under which ranks of the lane issued different things, and the leavers
  /// there.
  void find_leavers(const LaneOfAll& lane, std::vector<Left>& left) const {
    for (const auto& [sequence, column] : lane.by_sequence) {
      std::map<std::uint64_t, int> votes;
      for (const auto& [rank, index] : column) ++votes[lane.items.at(rank)[index]->what];
      if (votes.size() < 2) continue;
      std::map<std::uint64_t, int> orders;
      for (const auto& [rank, index] : column) {
        const auto expected = expected_at(whats_of(lane.items.at(rank)), index);
        if (expected != 0 && votes.contains(expected)) ++orders[expected];
      }
      const bool by_order = !orders.empty();
      const auto& counted = by_order ? orders : votes;
      const auto most =
          std::ranges::max_element(counted, {}, [](const auto& one) { return one.second; });
      // Two against two, and no earlier step: each of them may be right.
      const bool unclear =
          std::ranges::count(counted, most->second, [](const auto& one) { return one.second; }) > 1;
      for (const auto& [rank, index] : column) {
        const auto& items = lane.items.at(rank);
        if (!unclear && items[index]->what == most->first) continue;
        left.push_back(leaver(rank, items, index, unclear ? 0 : most->first, by_order));
      }
      return;
    }
  }

  Left leaver(int rank, const std::vector<const BoardItem*>& items, std::size_t index,
              std::uint64_t expected, bool by_order) const {
    const RankBoard& board = *board_of(rank);
    const BoardItem& item = *items[index];
    HangRoot root;
    root.rank = rank;
    root.cause = HangCause::kLeftOrder;
    root.issued = named(item, board);
    root.since_ms = item.age_ms;
    if (expected != 0) {
      root.should = named(expected);
      root.should->group = root.issued->group;
      root.should->sequence = root.issued->sequence;
      root.should->pass = root.issued->pass;
    }
    root.how = "issued something else";
    if (index > 0 && items[index - 1]->what == item.what) {
      root.how = "issued one twice";
    } else if (index + 1 < items.size() && items[index + 1]->what == expected) {
      root.how = "issued two in another order";
    } else if (expected != 0) {
      Whats with = whats_of(items);
      with.resize(index);
      with.push_back(expected);
      if (expected_at(with, with.size() - 1) == expected) {
        with.push_back(0);
        if (expected_at(with, with.size() - 1) == item.what) root.how = "skipped one";
      }
    }
    root.waited_for_by = waiting_for(rank);
    return {std::move(root), item.age_ms, by_order};
  }

  void find_leavers() {
    std::vector<Left> left;
    for (const auto& [hash, lane] : lanes_of_all()) find_leavers(lane, left);
    take(std::move(left));
  }

  /// The rank that left longest ago is the first; it caused what follows in other groups.
  void take(std::vector<Left> left) {
    std::ranges::sort(left, [](const Left& one, const Left& other) {
      return std::tuple(!one.by_order, -one.age_ms, one.root.rank) <
             std::tuple(!other.by_order, -other.age_ms, other.root.rank);
    });
    if (left.empty()) return;
    const bool by_order = left.front().by_order;
    const std::string group = left.front().root.issued->group;
    for (Left& one : left) {
      if (one.root.issued->group != group || one.by_order != by_order) continue;
      if (std::ranges::find(report_.roots, one.root.rank, &HangRoot::rank) == report_.roots.end()) {
        report_.roots.push_back(std::move(one.root));
      }
    }
  }

  int waiting_for(int rank) const {
    return waited_for_.contains(rank) ? static_cast<int>(waited_for_.at(rank).size()) : 0;
  }

  bool waits_for_others(int rank) const {
    return std::ranges::any_of(waited_for_, [&](const auto& one) {
      return std::ranges::any_of(one.second, [&](const Edge& edge) { return edge.from == rank; });
    });
  }

  HangCause cause_of(int rank) const {
    if (std::ranges::find(boards_.silent, rank) != boards_.silent.end()) return HangCause::kGone;
    const RankBoard* board = board_of(rank);
    if (board == nullptr) return HangCause::kMute;
    return board->threads_waiting > 0 && board->waits.empty() ? HangCause::kStore
                                                              : HangCause::kComputes;
  }

  void find_ends_of_waits() {
    std::vector<HangRoot> ends;
    for (const auto& [rank, edges] : waited_for_) {
      if (board_of(rank) != nullptr && waits_for_others(rank)) continue;
      ends.push_back(end_of_waits(rank));
    }
    for (const int rank : boards_.silent) {
      if (waiting_for(rank) == 0) ends.push_back(end_of_waits(rank));
    }
    // A rank that is gone counts before those that other evidence has named.
    const auto place = [](const HangRoot& root) {
      return std::tuple(root.waited_for_by == 0, root.cause, -root.waited_for_by, root.rank);
    };
    std::ranges::sort(ends, [&](const HangRoot& one, const HangRoot& other) {
      return place(one) < place(other);
    });
    report_.roots = std::move(ends);
  }

  HangRoot end_of_waits(int rank) const {
    HangRoot root;
    root.rank = rank;
    root.cause = cause_of(rank);
    root.waited_for_by = waiting_for(rank);
    if (const auto found = waited_for_.find(rank); found != waited_for_.end()) {
      const Edge& first = first_of(rank, found->second);
      const RankBoard& waits = *board_of(first.from);
      root.should = named(*first.wait, waits);
      if (first.wait->lane == kMessageLane) root.should = other_end_of(*root.should);
      add_pending(rank, *first.wait, root);
    } else if (board_of(rank) == nullptr) {
      root.should = next_by_others(rank);
    }
    if (const RankBoard* board = board_of(rank); board != nullptr && !board->items.empty()) {
      root.issued = named(board->items.back(), *board);
      root.since_ms = board->items.back().age_ms;
    }
    return root;
  }

  /// Adds what others have issued in groups of the rank and have not seen end, such as reductions:
  /// it may be delayed there, while they wait for it in `first`.
  void add_pending(int rank, const BoardWait& first, HangRoot& root) const {
    const RankBoard* own = board_of(rank);
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::pair<const BoardItem*, const RankBoard*>>
        pending;
    for (const RankBoard& board : boards_.boards) {
      std::set<std::uint64_t> ending;  // lanes whose collectives are known to end
      for (const BoardItem& item : board.items) {
        if (item.done) ending.insert(item.lane);
      }
      for (const BoardItem& item : board.items) {
        if (item.done || !ending.contains(item.lane) || item.what == first.what) continue;
        const BoardLane* lane = board.lane(item.lane);
        const auto members = lane == nullptr ? std::vector<int>() : ranks_in(lane->name);
        if (std::ranges::find(members, rank) == members.end()) continue;
        pending.try_emplace({item.lane, item.sequence}, &item, &board);
      }
    }
    std::vector<std::pair<const BoardItem*, const RankBoard*>> latest;
    std::size_t earliest = own == nullptr ? 0 : next_of(*own, first);
    for (const auto& [key, one] : pending) {
      if (own == nullptr) {
        latest.push_back(one);
        continue;
      }
      const BoardLane* same = own->lane(key.first);
      if (key.second != (same == nullptr ? 0 : same->count)) continue;  // the next one of the group
      const std::size_t place = comm::next_of(*own, *one.first);
      if (place >= earliest) continue;
      earliest = place;
      root.should = named(*one.first, *one.second);
    }
    std::ranges::sort(latest, {}, [](const auto& one) { return one.first->age_ms; });
    for (const auto& [item, board] : latest) root.pending.push_back(named(*item, *board));
  }

  /// Returns, for a rank that was lost before any rank waited for it, what comes after the last
  /// issue that it has certainly reached, by the earlier steps of the rank with which it shares the
  /// most groups.
  std::optional<NamedIssue> next_by_others(int rank) const {
    const RankBoard* like = nullptr;
    std::set<std::uint64_t> shared;
    for (const RankBoard& board : boards_.boards) {
      std::set<std::uint64_t> lanes;
      for (const BoardLane& lane : board.lanes) {
        const auto members = ranks_in(lane.name);
        if (std::ranges::find(members, rank) != members.end()) lanes.insert(lane.hash);
      }
      if (lanes.size() <= shared.size()) continue;
      shared = std::move(lanes);
      like = &board;
    }
    if (like == nullptr) return std::nullopt;
    const auto& items = like->items;
    const auto last = std::find_if(items.rbegin(), items.rend(), [&](const BoardItem& item) {
      return item.done && shared.contains(item.lane);
    });
    Whats until_then;
    for (auto item = items.begin(); item != last.base(); ++item) until_then.push_back(item->what);
    const std::size_t here = place_like(until_then, until_then.size());
    if (here == 0) return std::nullopt;
    const auto next =
        std::find_if(items.begin() + static_cast<std::ptrdiff_t>(here), last.base(),
                     [&](const BoardItem& item) { return shared.contains(item.lane); });
    if (next == last.base()) return std::nullopt;
    NamedIssue issue = named(*next, *like);
    issue.sequence.reset();  // belongs to an earlier step
    return issue;
  }

  NamedIssue other_end_of(NamedIssue message) const {
    message.what = other_end(message.what);
    message.words = named(message.what).words;
    const std::string_view is = (message.what & 1U) != 0 ? "send" : "receive";
    if (const auto of = message.words.op.find(" of "); of != std::string::npos) {
      message.words.op = concat(is, message.words.op.substr(of));
    }
    return message;
  }

  static std::size_t next_of(const RankBoard& board, const BoardWait& wait) {
    return comm::next_of(board, {wait.lane, is_for(wait), 0, 0, wait.pass});
  }

  /// Picks, among the waits for a rank, the one that it reaches first: by its own earlier steps,
  /// or, where it has said nothing, by the order in which a rank that does the same, and is ahead,
  /// issued them.
  const Edge& first_of(int rank, const std::vector<Edge>& edges) const {
    const Edge* first = &edges.front();
    if (const RankBoard* own = board_of(rank)) {
      for (const Edge& edge : edges) {
        if (next_of(*own, *edge.wait) < next_of(*own, *first->wait)) first = &edge;
      }
      return *first;
    }
    std::size_t most = 0;
    for (const RankBoard& board : boards_.boards) {
      if (board.rank == rank) continue;
      std::map<std::size_t, const Edge*> places;
      for (const Edge& edge : edges) {
        if (const auto place = place_of(board, *edge.wait)) places.try_emplace(*place, &edge);
      }
      if (places.size() > most ||
          (places.size() == most && most > 0 && edges.size() > 1 && first == &edges.front())) {
        most = places.size();
        first = places.begin()->second;
      }
    }
    return *first;
  }

  // Cycles.

  /// Examines each wait of a cycle: the rank that is waited for has not reached it, and waits in
  /// something else. Where the first comes before the second in that rank's earlier steps, it was
  /// left out.
  void find_leavers_of_cycles() {
    std::vector<Left> left;
    for_waits_in_cycles([&](const RankBoard& board, const BoardWait& wait) {
      add_left_out(board, wait, issues_of_own_wait(board), left);
    });
    if (left.empty()) {
      for_waits_in_cycles([&](const RankBoard& board, const BoardWait& wait) {
        add_left_out(board, wait, ends_of_own_wait(board), left);
      });
    }
    if (left.empty()) {
      for (const auto& [rank, edges] : waited_for_) {
        const RankBoard* board = board_of(rank);
        if (board != nullptr && !board->waits.empty()) add_own_leaver(*board, left);
      }
    }
    if (left.empty()) {
      for_waits_in_cycles(
          [&](const RankBoard& board, const BoardWait& wait) { add_doubled(board, wait, left); });
    }
    take(std::move(left));
    if (!report_.roots.empty()) return;
    for (const auto& [rank, edges] : waited_for_) {
      HangRoot root = end_of_waits(rank);
      root.cause = HangCause::kCycle;
      report_.roots.push_back(std::move(root));
    }
  }

  /// `visit` takes a rank that waits, and a wait for that rank.
  template <class Visit>
  void for_waits_in_cycles(const Visit& visit) const {
    for (const auto& [rank, edges] : waited_for_) {
      const RankBoard* board = board_of(rank);
      if (board == nullptr || board->waits.empty()) continue;
      for (const Edge& edge : edges) visit(*board, *edge.wait);
    }
  }

  /// Positions in the order of a rank; the last one is in this step.
  using Places = std::vector<std::size_t>;

  /// The positions at which the rank issued what it waits in, the present one last.
  static Places issues_of_own_wait(const RankBoard& board) {
    Places places;
    bool is_last = false;
    for (std::size_t i = 0; i < board.items.size(); ++i) {
      if (!is_as(board.items[i], board.waits.front())) continue;
      places.push_back(i);
      is_last = board.items[i].sequence == board.waits.front().sequence;
    }
    return is_last ? places : Places();
  }

  /// The number of issues of the rank whenever what it waits in ended in earlier steps, and now. A
  /// wait for a message may begin long after the message was posted.
  static Places ends_of_own_wait(const RankBoard& board) {
    Places places;
    for (std::size_t i = 0; i < board.items.size(); ++i) {
      const BoardItem& item = board.items[i];
      if (!item.done || !is_as(item, board.waits.front())) continue;
      places.push_back(std::min<std::size_t>(i + 1 + item.issued_until_done, board.items.size()));
    }
    std::ranges::sort(places);
    places.push_back(board.items.size());
    return places;
  }

  static bool is_as(const BoardItem& item, const BoardWait& wait) {
    return item.what == wait.what && item.pass == wait.pass && item.lane == wait.lane;
  }

  /// Adds a leaver where, between the last two of `places`, the rank has not reached what another
  /// rank waits for, though it always had before; the order of its threads does not matter.
  void add_left_out(const RankBoard& board, const BoardWait& wait, const Places& places,
                    std::vector<Left>& left) const {
    constexpr std::size_t kFewest = 3;
    if (places.size() < kFewest || has_issued(board, wait)) return;
    const std::uint64_t left_out = is_for(wait);
    const auto between = [&](std::size_t i) {
      return std::count_if(board.items.begin() + static_cast<std::ptrdiff_t>(places[i - 1]),
                           board.items.begin() + static_cast<std::ptrdiff_t>(places[i]),
                           [&](const BoardItem& item) { return item.what == left_out; });
    };
    const std::size_t last = places.size() - 1;
    std::ptrdiff_t fewest = between(1);
    for (std::size_t i = 2; i < last; ++i) fewest = std::min(fewest, between(i));
    if (between(last) >= fewest) return;
    Left one = left_out_by(board, wait);
    const bool at_once =
        2 * (places[last] - places[last - 1]) < places[last - 1] - places[last - 2];
    one.root.how = at_once ? "issued one twice" : "skipped one";
    left.push_back(std::move(one));
  }

  /// The rank issued what it waits in without what `wait` is for.
  Left left_out_by(const RankBoard& board, const BoardWait& wait) const {
    const BoardWait& waits_in = board.waits.front();
    const auto own = std::find_if(board.items.rbegin(), board.items.rend(),
                                  [&](const BoardItem& item) { return is_as(item, waits_in); });
    Left one{{}, waits_in.waited_ms, true};
    one.root.rank = board.rank;
    one.root.cause = HangCause::kLeftOrder;
    one.root.issued = named(*own, board);
    one.root.since_ms = own->age_ms;
    one.root.should = should_be_in(is_for(wait), board, wait);
    one.root.waited_for_by = waiting_for(board.rank);
    return one;
  }

  NamedIssue should_be_in(std::uint64_t what, const RankBoard& board, const BoardWait& wait) const {
    NamedIssue issue = named(what);
    const BoardLane* lane = board.lane(wait.lane);
    issue.group = lane != nullptr ? lane->name : "messages";
    if (lane != nullptr) issue.sequence = wait.sequence;
    return issue;
  }

  /// Adds a leaver where, in the group of its own wait, the rank issued something other than what
  /// comes next, and no other rank has reached that.
  void add_own_leaver(const RankBoard& board, std::vector<Left>& left) const {
    const BoardWait& own = board.waits.front();
    const auto items = items_of(board, {own.lane});
    if (items.empty() || own.lane == kMessageLane) return;
    const auto expected = expected_at(whats_of(items), items.size() - 1);
    if (expected == 0 || expected == items.back()->what) return;
    left.push_back(leaver(board.rank, items, items.size() - 1, expected, true));
  }

  /// Picks, among the rank's latest issues in the group of its own wait and in that of a wait for
  /// it, the first that came directly before, too, where something else comes next.
  void add_doubled(const RankBoard& board, const BoardWait& wait, std::vector<Left>& left) const {
    const BoardWait& own = board.waits.front();
    const auto items = items_of(board, {wait.lane, own.lane});
    const Whats whats = whats_of(items);
    for (std::size_t i = 1; i < items.size(); ++i) {
      if (items[i]->age_ms > own.waited_ms + kLookedAtMs) continue;
      if (whats[i - 1] != whats[i]) continue;
      const auto expected = expected_at(whats, i);
      if (expected == 0 || expected == whats[i]) continue;
      left.push_back(leaver(board.rank, items, i, expected, true));
      left.back().root.should->sequence.reset();
      return;
    }
  }

  static constexpr std::int64_t kLookedAtMs = 1000;

  const Boards& boards_;
  std::map<int, const RankBoard*> by_rank_;
  std::map<int, std::vector<Edge>> waited_for_;  // by the rank that is waited for
  HangReport report_;
};

}  // namespace

HangReport find_hang(const Boards& boards) { return Finder(boards).find(); }

}  // namespace tessera::comm
