#include "launch/rank_board.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "tessera/error.h"

namespace tessera::comm {

namespace store_key {
std::string board(int epoch, int rank) { return concat("board/", epoch, "/", rank); }
std::string boards_read(int epoch) { return concat("boards read/", epoch); }
}  // namespace store_key

namespace {

constexpr std::string_view kOfRanks = " of ranks ";
// Far more than encode() writes.
constexpr std::size_t kMostRead = 1 << 16;
constexpr std::int64_t kMostMs = std::int64_t{1} << 40;  // 35 years

/// Reads what encode() writes, field by field; `ok` says whether all of them were there.
class Reader {
 public:
  explicit Reader(const std::string& text) : in_(text) {}
  template <class Number>
  Number number() {
    Number value{};
    ok_ = ok_ && static_cast<bool>(in_ >> value);
    return value;
  }
  /// Returns the rest of the line, after one space.
  std::string line() {
    std::string text;
    ok_ = ok_ && in_.get() == ' ' && static_cast<bool>(std::getline(in_, text));
    return text;
  }
  /// Returns a time that can be added to another and negated.
  std::int64_t ms() { return std::clamp<std::int64_t>(number<std::int64_t>(), 0, kMostMs); }
  std::size_t count(std::size_t most) {
    const auto value = number<std::size_t>();
    ok_ = ok_ && value <= most;
    return ok_ ? value : 0;
  }
  bool ok() const { return ok_; }

 private:
  std::istringstream in_;
  bool ok_ = true;
};

std::string one_word_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::replace(text.begin(), text.end(), '\t', ' ');
  return text;
}

// How much of what came before is compared: more than a layer's collectives, which repeat.
constexpr std::size_t kLongestContext = 96;
/// Reads the number of a rank, or the difference of two.
bool read_number(std::string_view text, int& number) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && stop == text.data() + text.size() && number >= 0 &&
         number <= static_cast<int>(kMostRead);
}

}  // namespace

const BoardLane* RankBoard::lane(std::uint64_t hash) const {
  const auto found = std::ranges::find(lanes, hash, &BoardLane::hash);
  return found == lanes.end() ? nullptr : &*found;
}

std::size_t items_for(int ranks) {
  return std::clamp<std::size_t>((1U << 17U) / static_cast<std::size_t>(std::max(ranks, 1)), 256,
                                 2048);
}

RankBoard make_board(int rank, int threads_waiting, const std::vector<TimedWait>& waits,
                     std::vector<BoardLane> lanes, const OrderLog& log, std::size_t most_items) {
  const auto now = std::chrono::steady_clock::now();
  const auto ms_since = [&](std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - time).count();
  };
  RankBoard board;
  board.rank = rank;
  board.threads_waiting = threads_waiting;
  board.lanes = std::move(lanes);
  for (const TimedWait& one : waits) {
    board.waits.push_back({one.wait.is_message ? kMessageLane : one.wait.group, one.wait.what,
                           one.wait.sequence, one.wait.peer, ms_since(one.since), Pass::kForward,
                           one.wait.text});
  }
  for (const LoggedIssue& one : log.latest(most_items)) {
    board.items.push_back({one.lane, one.what, one.sequence, ms_since(one.time), one.pass, one.done,
                           one.issued_until_done});
    for (BoardWait& wait : board.waits) {
      const bool is_this = wait.lane == one.lane && wait.sequence == one.sequence;
      if (is_this && wait.what == one.what) wait.pass = one.pass;
    }
    if (board.names.contains(one.what)) continue;
    if (auto words = log.words(one.what)) board.names[one.what] = *std::move(words);
  }
  return board;
}

std::string encode(const RankBoard& board) {
  std::map<std::uint64_t, std::size_t> lane_of, name_of;
  std::string text = concat(board.rank, " ", board.threads_waiting, " ", board.waits.size(), " ",
                            board.lanes.size(), " ", board.names.size(), " ", board.items.size());
  for (const BoardWait& wait : board.waits) {
    text += concat("\n", wait.lane, " ", wait.what, " ", wait.sequence, " ", wait.peer, " ",
                   wait.waited_ms, " ", wait.pass == Pass::kBackward ? 1 : 0, " ",
                   one_word_line(wait.text));
  }
  for (const BoardLane& lane : board.lanes) {
    lane_of.emplace(lane.hash, lane_of.size());
    text += concat("\n", lane.hash, " ", lane.count, " ", one_word_line(lane.name));
  }
  for (const auto& [what, words] : board.names) {
    name_of.emplace(what, name_of.size());
    text += concat("\n", what, " ", words.micro_batch, " ", one_word_line(words.op), "\n ",
                   one_word_line(words.unit));
  }
  // An item mostly follows the one before it, so it holds numbers of lanes and names, and
  // differences of sequences.
  std::map<std::uint64_t, std::uint64_t> next;
  for (const BoardItem& item : board.items) {
    const auto lane = lane_of.find(item.lane);
    const auto name = name_of.find(item.what);
    text += lane == lane_of.end() ? concat("\n-1 ", item.lane) : concat("\n", lane->second);
    text += name == name_of.end() ? concat(" -1 ", item.what) : concat(" ", name->second);
    text += concat(" ", item.sequence - next[item.lane], " ", item.age_ms, " ",
                   item.pass == Pass::kBackward ? 1 : 0, " ",
                   item.done ? item.issued_until_done + 1 : 0);
    next[item.lane] = item.sequence + 1;
  }
  return text + "\nend\n";
}

std::optional<RankBoard> decode_board(const std::string& text) {
  Reader in(text);
  RankBoard board;
  board.rank = in.number<int>();
  board.threads_waiting = in.number<int>();
  const auto waits = in.count(kMostRead), lanes = in.count(kMostRead), names = in.count(kMostRead),
             items = in.count(kMostRead);
  for (std::size_t i = 0; i < waits && in.ok(); ++i) {
    BoardWait& wait = board.waits.emplace_back();
    wait.lane = in.number<std::uint64_t>();
    wait.what = in.number<std::uint64_t>();
    wait.sequence = in.number<std::uint64_t>();
    wait.peer = in.number<int>();
    wait.waited_ms = in.ms();
    wait.pass = in.number<int>() == 1 ? Pass::kBackward : Pass::kForward;
    wait.text = in.line();
  }
  for (std::size_t i = 0; i < lanes && in.ok(); ++i) {
    BoardLane& lane = board.lanes.emplace_back();
    lane.hash = in.number<std::uint64_t>();
    lane.count = in.number<std::uint64_t>();
    lane.name = in.line();
  }
  std::vector<std::uint64_t> whats;
  for (std::size_t i = 0; i < names && in.ok(); ++i) {
    IssueWords& words = board.names[whats.emplace_back(in.number<std::uint64_t>())];
    words.micro_batch = in.number<std::uint32_t>();
    words.op = in.line();
    words.unit = in.line();
  }
  std::map<std::uint64_t, std::uint64_t> next;
  for (std::size_t i = 0; i < items && in.ok(); ++i) {
    BoardItem& item = board.items.emplace_back();
    const auto lane = in.number<std::int64_t>();
    if (lane >= std::ssize(board.lanes)) return std::nullopt;
    item.lane =
        lane < 0 ? in.number<std::uint64_t>() : board.lanes[static_cast<std::size_t>(lane)].hash;
    const auto name = in.number<std::int64_t>();
    if (name >= std::ssize(whats)) return std::nullopt;
    item.what = name < 0 ? in.number<std::uint64_t>() : whats[static_cast<std::size_t>(name)];
    item.sequence = in.number<std::uint64_t>() + next[item.lane];
    next[item.lane] = item.sequence + 1;
    item.age_ms = in.ms();
    item.pass = in.number<int>() == 1 ? Pass::kBackward : Pass::kForward;
    const auto until_done = in.count(kMostRead);
    item.done = until_done > 0;
    item.issued_until_done = until_done - (item.done ? 1 : 0);
  }
  if (!in.ok() || !text.ends_with("\nend\n")) return std::nullopt;
  return board;
}

std::size_t place_like(const Whats& whats, std::size_t at) {
  std::size_t place = 0, longest = 0;
  for (std::size_t earlier = at; earlier-- > 1 && longest < kLongestContext;) {
    std::size_t same = 0;
    while (same < kLongestContext && same < earlier &&
           whats[earlier - 1 - same] == whats[at - 1 - same]) {
      ++same;
    }
    if (same > longest) {
      longest = same;
      place = earlier;
    }
  }
  return place;
}

std::uint64_t expected_at(const Whats& whats, std::size_t at) {
  const std::size_t place = place_like(whats, at);
  return place == 0 ? 0 : whats[place];
}

std::vector<const BoardItem*> items_of(const RankBoard& board,
                                       const std::set<std::uint64_t>& lanes) {
  std::vector<const BoardItem*> items;
  for (const BoardItem& item : board.items) {
    if (lanes.contains(item.lane)) items.push_back(&item);
  }
  return items;
}

Whats whats_of(const std::vector<const BoardItem*>& items) {
  Whats whats;
  for (const BoardItem* item : items) whats.push_back(item->what);
  return whats;
}

bool has_issued(const RankBoard& board, const BoardWait& wait) {
  if (wait.lane != kMessageLane) {
    const BoardLane* lane = board.lane(wait.lane);
    return lane != nullptr && lane->count > wait.sequence;
  }
  return std::ranges::any_of(board.items, [&](const BoardItem& item) {
    return item.lane == kMessageLane && item.sequence == wait.sequence;
  });
}

std::optional<std::size_t> place_of(const RankBoard& board, const BoardWait& wait) {
  const bool is_message = wait.lane == kMessageLane;
  const std::uint64_t what = is_message ? other_end(wait.what) : wait.what;
  for (std::size_t i = board.items.size(); i-- > 0;) {
    const BoardItem& item = board.items[i];
    if (item.what == what && item.sequence == wait.sequence &&
        (item.lane == kMessageLane) == is_message) {
      return i;
    }
  }
  return std::nullopt;
}

std::uint64_t is_for(const BoardWait& wait) {
  return wait.lane == kMessageLane ? other_end(wait.what) : wait.what;
}

std::size_t next_of(const RankBoard& board, const BoardItem& one) {
  const auto items = items_of(board, {one.lane});
  const auto here = static_cast<std::ptrdiff_t>(place_like(whats_of(items), items.size()));
  const auto next = std::find_if(items.begin() + here, items.end(), [&](const BoardItem* item) {
    return item->what == one.what && item->pass == one.pass;
  });
  if (next == items.end()) return board.items.size();
  return static_cast<std::size_t>(*next - board.items.data());
}

std::string purpose_in(const std::string& group) { return group.substr(0, group.find(kOfRanks)); }

std::vector<int> ranks_in(const std::string& group) {
  const auto at = group.rfind(kOfRanks);
  if (at == std::string::npos) return {};
  std::string_view text = std::string_view(group).substr(at + kOfRanks.size());
  std::vector<int> ranks;
  if (const auto to = text.find(" to "); to != std::string_view::npos) {
    const auto by = text.find(" by ");
    int first = 0, last = 0, step = 1;
    if (!read_number(text.substr(0, to), first) ||
        !read_number(text.substr(to + 4, by == std::string_view::npos ? by : by - to - 4), last) ||
        (by != std::string_view::npos && !read_number(text.substr(by + 4), step)) || step < 1) {
      return {};
    }
    for (int rank = first; rank <= last; rank += step) ranks.push_back(rank);
    return ranks;
  }
  while (!text.empty()) {
    const auto comma = std::min(text.find(','), text.size());
    if (!read_number(text.substr(0, comma), ranks.emplace_back())) return {};
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return ranks;
}

Boards collect_boards(WatchedStore& store, int epoch, int ranks, const RankBoard& own,
                      std::chrono::milliseconds time, std::chrono::milliseconds pause) {
  std::map<int, RankBoard> came{{own.rank, own}};
  std::map<int, std::string> first_beats;
  std::vector<int> missing;
  const auto end = std::chrono::steady_clock::now() + time;
  const auto ask = [&](const auto& key_of) {
    std::vector<std::string> keys;
    for (const int rank : missing) keys.push_back(key_of(rank));
    return keys.empty() ? std::vector<std::optional<std::string>>() : store.find(keys);
  };
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank != own.rank) missing.push_back(rank);
  }
  for (bool last = false;;) {
    const auto texts = ask([&](int rank) { return store_key::board(epoch, rank); });
    std::vector<int> still;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      auto board = texts[i] ? decode_board(*texts[i]) : std::nullopt;
      if (board && board->rank == missing[i]) {
        came.emplace(missing[i], *std::move(board));
      } else {
        still.push_back(missing[i]);
      }
    }
    missing = std::move(still);
    if (missing.empty() || last) break;
    if (first_beats.empty()) {
      const auto beats = ask(store_key::pulse);
      for (std::size_t i = 0; i < missing.size(); ++i) {
        first_beats[missing[i]] = beats[i].value_or("");
      }
    }
    last = std::chrono::steady_clock::now() + pause >= end;
    std::this_thread::sleep_for(pause);
  }
  Boards all{ranks, own.rank, {}, {}, {}};
  for (auto& [rank, board] : came) all.boards.push_back(std::move(board));
  const auto beats = ask(store_key::pulse);
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const bool beats_still = first_beats[missing[i]] != beats[i].value_or("");
    (beats_still ? all.mute : all.silent).push_back(missing[i]);
  }
  return all;
}

}  // namespace tessera::comm
