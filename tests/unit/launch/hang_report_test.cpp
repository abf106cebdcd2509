// Who is to blame for a hang, worked out from drawn boards: ranks run the same steps over groups of
// two axes until one of them goes wrong, the others go on as far as they can without it.
#include "launch/hang_report.h"

#include <random>

#include "support/test.h"
#include "tessera/error.h"

namespace tessera::comm::hang_report_test {
namespace {

using Kinds = std::vector<std::string>;

struct Call {
  std::string group;  ///< its name
  std::uint64_t what = 0;
  std::string unit;
  std::uint64_t sequence = 0;
};

/// Ranks on a grid of two axes. Each step goes through some layers: a gather over the rows, exchanges
/// over the columns; then a sum over all.
struct Grid {
  int rows = 2, columns = 2, layers = 3;
  int ranks() const { return rows * columns; }
  std::vector<int> row(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < columns; ++i) ranks.push_back(rank / columns * columns + i);
    return ranks;
  }
  std::vector<int> column(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < rows; ++i) ranks.push_back(rank % columns + i * columns);
    return ranks;
  }
  static std::string name(const std::string& purpose, const std::vector<int>& ranks) {
    std::string text = purpose + " of ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? "" : ",", ranks[i]);
    return text;
  }
  std::vector<Call> step(int rank) const {
    std::vector<Call> calls;
    std::vector<int> all;
    for (int i = 0; i < ranks(); ++i) all.push_back(i);
    for (int layer = 0; layer < layers; ++layer) {
      const std::string unit = concat("layers.", layer);
      const auto number = static_cast<std::uint64_t>(layer);
      calls.push_back({name("gather", column(rank)), 100 + number, unit});
      calls.push_back({name("transitions on tp", row(rank)), 200 + number, unit + " (enter)"});
      calls.push_back({name("transitions on tp", row(rank)), 300 + number, unit + " (leave)"});
    }
    calls.push_back({name("data", all), 400, "gradient norm"});
    return calls;
  }
};

std::uint64_t hash_of(const std::string& group) { return std::hash<std::string>{}(group) | 1U; }

/// Runs the ranks in turn: each issues what comes next, and waits for it until all of its group have
/// issued it under that number.
class Simulation {
 public:
  Simulation(const Grid& grid, int steps) : grid_(grid) {
    for (int rank = 0; rank < grid.ranks(); ++rank) {
      auto& calls = calls_.emplace_back();
      for (int step = 0; step < steps; ++step) {
        for (const Call& call : grid.step(rank)) calls.push_back(call);
      }
    }
    at_.resize(calls_.size());
    counts_.resize(calls_.size());
    boards_.resize(calls_.size());
  }

  std::vector<Call>& calls(int rank) { return calls_[static_cast<std::size_t>(rank)]; }
  void ends(int rank, std::size_t before) { end_[rank] = before; }

  Boards run(const std::set<int>& without) {
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < grid_.ranks(); ++rank) moves = moves_on(rank) || moves;
    }
    Boards all{grid_.ranks(), 0, {}, {}, {}};
    for (int rank = 0; rank < grid_.ranks(); ++rank) {
      if (without.contains(rank)) {
        all.silent.push_back(rank);
      } else {
        all.boards.push_back(board(rank));
      }
    }
    return all;
  }

 private:
  bool moves_on(int rank) {
    const auto self = static_cast<std::size_t>(rank);
    if (waiting_.contains(rank) && !is_complete(rank)) return false;
    waiting_.erase(rank);
    const std::size_t next = at_[self];
    if (next == calls_[self].size() || (end_.contains(rank) && next >= end_[rank])) return false;
    Call call = calls_[self][at_[self]++];
    call.sequence = counts_[self][call.group]++;
    issued_[{call.group, call.sequence}][rank] = call.what;
    boards_[self].push_back(call);
    waiting_[rank] = call;
    return true;
  }
  bool is_complete(int rank) {
    const Call& call = waiting_.at(rank);
    const auto& issued = issued_[{call.group, call.sequence}];
    return std::ranges::all_of(ranks_in(call.group), [&](int member) {
      const auto found = issued.find(member);
      return found != issued.end() && found->second == call.what;
    });
  }
  RankBoard board(int rank) {
    const auto self = static_cast<std::size_t>(rank);
    RankBoard board;
    board.rank = rank;
    for (const auto& [group, count] : counts_[self])
      board.lanes.push_back({hash_of(group), group, count});
    std::int64_t age = static_cast<std::int64_t>(boards_[self].size()) + 3000;
    for (const Call& call : boards_[self]) {
      const bool waits = &call == &boards_[self].back() && waiting_.contains(rank);
      board.items.push_back(
          {hash_of(call.group), call.what, call.sequence, age--, Pass::kForward, !waits});
      board.names[call.what] = {"op", call.unit, 0};
    }
    if (waiting_.contains(rank)) {
      const Call& call = waiting_.at(rank);
      board.threads_waiting = 1;
      board.waits.push_back(
          {hash_of(call.group), call.what, call.sequence, -1, 3000, Pass::kForward, call.unit});
    }
    return board;
  }

  const Grid grid_;
  std::vector<std::vector<Call>> calls_;
  std::vector<std::size_t> at_;
  std::vector<std::map<std::string, std::uint64_t>> counts_;
  std::vector<std::vector<Call>> boards_;
  std::map<int, Call> waiting_;
  std::map<int, std::size_t> end_;
  std::map<std::pair<std::string, std::uint64_t>, std::map<int, std::uint64_t>> issued_;
};

struct Drawn {
  Grid grid;
  std::string kind;
  int rank = 0;
  std::size_t at = 0;
};

Drawn drawn(unsigned seed) {
  std::mt19937 random(seed);
  const Kinds kinds{"gone", "computes", "skips", "twice", "swaps"};
  Drawn one;
  one.grid = {2 + static_cast<int>(random() % 3), 2 + static_cast<int>(random() % 3),
              2 + static_cast<int>(random() % 4)};
  one.kind = kinds[random() % kinds.size()];
  one.rank = static_cast<int>(random() % static_cast<unsigned>(one.grid.ranks()));
  const std::size_t step = one.grid.step(0).size();
  one.at = 3 * step + random() % step;
  return one;
}

TEST(HangReport, OfDrawnBoardsNamesTheRankAndTheUnit) {
  int hangs = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    const Drawn one = drawn(seed);
    SCOPED_TRACE(concat("seed ", seed, ": rank ", one.rank, " ", one.kind, " at ", one.at, ", ",
                        one.grid.rows, " x ", one.grid.columns));
    Simulation ranks(one.grid, 6);
    auto& calls = ranks.calls(one.rank);
    const auto place = calls.begin() + static_cast<std::ptrdiff_t>(one.at);
    const Call truth = *place;
    if (one.kind == "gone" || one.kind == "computes") ranks.ends(one.rank, one.at);
    if (one.kind == "skips") calls.erase(place);
    if (one.kind == "twice") calls.insert(place, truth);
    if (one.kind == "swaps") std::swap(*place, *(place + 1));
    const Boards boards = ranks.run(one.kind == "gone" ? std::set{one.rank} : std::set<int>{});
    const HangReport report = find_hang(boards);
    // Ranks of another group may have done the second one of two already: then all go on.
    if (one.kind == "swaps" && report.waits.empty()) continue;
    ++hangs;
    ASSERT_FALSE(report.roots.empty());
    EXPECT_EQ(report.roots.front().rank, one.rank) << to_string(report);
    EXPECT_THAT(to_string(report).substr(0, to_string(report).find('\n', 60)), Says(truth.unit));
  }
  EXPECT_GT(hangs, 340);
}

TEST(HangReport, IsShortForAThousandRanks) {
  const Grid grid{32, 32, 2};
  Simulation ranks(grid, 4);
  ranks.ends(77, 3 * grid.step(0).size() + 2);
  const std::string text = to_string(find_hang(ranks.run({77})));
  EXPECT_THAT(text, Says("rank 77 is gone"));
  EXPECT_LE(std::ranges::count(text, '\n'), 20);
  EXPECT_LE(text.size(), 6000U);
}

TEST(RankBoard, IsTheSameBehindEncodingAndNothingElseIsRead) {
  Simulation ranks({2, 2, 3}, 4);
  ranks.ends(1, 25);
  for (RankBoard board : ranks.run({}).boards) {
    board.waits.push_back({kMessageLane, 7, 11, 2, 5, Pass::kBackward, "a message"});
    board.items.push_back({kMessageLane, 6, 99, 1, Pass::kBackward});
    const std::string text = encode(board);
    EXPECT_EQ(decode_board(text), board);
    std::mt19937 random(5);
    for (int i = 0; i < 300; ++i) {
      std::string other = text;
      other[random() % other.size()] = static_cast<char>(random() % 128);
      static_cast<void>(decode_board(other));
      EXPECT_EQ(decode_board(text.substr(0, random() % (text.size() - 1))), std::nullopt);
    }
  }
}

TEST(RankBoard, RanksOfAGroupAreReadFromItsName) {
  EXPECT_THAT(ranks_in("gather of ranks 0,3"), ElementsAre(0, 3));
  EXPECT_THAT(ranks_in("data of ranks 2 to 4"), ElementsAre(2, 3, 4));
  EXPECT_THAT(ranks_in("data of ranks 1 to 9 by 4"), ElementsAre(1, 5, 9));
  EXPECT_THAT(ranks_in("of mine"), ElementsAre());
  EXPECT_THAT(ranks_in("g of ranks 1,x"), ElementsAre());
}

}  // namespace
}  // namespace tessera::comm::hang_report_test
