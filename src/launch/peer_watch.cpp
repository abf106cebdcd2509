#include "launch/peer_watch.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/text/printable.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"

namespace tessera::comm {

namespace store_key {
std::string abort(int epoch) { return concat("abort/", epoch); }
std::string pulse(int rank) { return concat("pulse/", rank); }
std::string asked(int epoch, int rank) { return concat("asked/", epoch, "/", rank); }
std::string issued(int epoch, int rank) { return concat("issued/", epoch, "/", rank); }
}  // namespace store_key

namespace {

// A rank whose neighbour is lost with it, for example on the same host, is watched by another rank,
// too.
constexpr std::size_t kWatchedBefore = 2;

// Ranks that wait in the same collective differ by what was issued ahead: a few.
constexpr std::size_t kPublishedHashes = 8;
// The messages in flight that a pulse holds: all of most schedules. Nothing is concluded about
// those of a rank that has more.
constexpr std::size_t kPublishedMessages = 32;

// The longest chain of waits that is followed: the rounds of one collective for more ranks than
// there are, and some for other collectives through which it may lead.
constexpr std::size_t kLongestChain = 40;

std::vector<std::string_view> fields_of(std::string_view line) {
  std::vector<std::string_view> fields;
  for (std::size_t begin = 0; begin <= line.size();) {
    const auto end = std::min(line.find('\t', begin), line.size());
    fields.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return fields;
}

template <class Number>
bool read(std::string_view text, Number& number, int base = 10) {
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number, base);
  return error == std::errc() && stop == end;
}

std::string hex(std::uint64_t value) {
  char digits[16];
  const auto end = std::to_chars(digits, digits + sizeof digits, value, 16).ptr;
  return {digits, end};
}

struct Line {
  std::string fingerprint;
  std::string text;
};

/// (group, sequence) -> line. Lines that do not parse are left out: they come from another process.
std::map<std::pair<std::string, std::uint64_t>, Line> parse(const std::string& lines) {
  std::map<std::pair<std::string, std::uint64_t>, Line> parsed;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    const auto fields = fields_of(line);
    std::uint64_t sequence = 0;
    if (fields.size() != 4 || fields[3].empty() || !read(fields[1], sequence)) continue;
    parsed[{std::string(fields[0]), sequence}] = {std::string(fields[2]), std::string(fields[3])};
  }
  return parsed;
}

const IssuedHashes* of_group(const std::vector<IssuedHashes>& issued, std::uint64_t group) {
  const auto found = std::find_if(issued.begin(), issued.end(),
                                  [&](const auto& one) { return one.group == group; });
  return found == issued.end() ? nullptr : &*found;
}

bool holds(const IssuedHashes& messages, std::uint64_t hash) {
  return std::find(messages.latest.begin(), messages.latest.end(), hash) != messages.latest.end();
}

/// Whether the rank has issued it, or may have.
bool has_issued(const Pulse& pulse, const PeerWait& wait) {
  const auto* issued = of_group(pulse.issued, wait.group);
  if (issued == nullptr) return false;
  if (!issued->of_messages) return issued->count > wait.sequence;
  return holds(*issued, wait.sequence) || issued->count > issued->latest.size();
}

bool read_wait(const std::vector<std::string_view>& fields, Pulse& pulse) {
  PeerWait wait;
  if (fields.size() != 8 || !read(fields[1], pulse.epoch) || !read(fields[2], pulse.waits) ||
      !read(fields[3], wait.group, 16) || !read(fields[4], wait.sequence) ||
      !read(fields[5], wait.peer) || !read(fields[6], pulse.cause)) {
    return false;
  }
  wait.text = fields[7];
  pulse.wait = std::move(wait);
  return true;
}

std::optional<IssuedHashes> read_issued(const std::vector<std::string_view>& fields) {
  IssuedHashes issued;
  if (fields.size() < 3 || !read(fields[1], issued.group, 16) || !read(fields[2], issued.count)) {
    return std::nullopt;
  }
  for (std::size_t i = 3; i < fields.size(); ++i) {
    if (!read(fields[i], issued.latest.emplace_back(), 16)) return std::nullopt;
  }
  issued.of_messages = fields[0] == "posted";
  return issued;
}

}  // namespace

Issued compare(const IssuedHashes& one, const IssuedHashes& other) {
  const std::uint64_t common = std::min(one.count, other.count);
  if (common == 0) return Issued::kSame;
  const std::uint64_t before_one = one.count - common;
  const std::uint64_t before_other = other.count - common;
  if (before_one >= one.latest.size() || before_other >= other.latest.size()) {
    return Issued::kTooFar;
  }
  return one.latest[before_one] == other.latest[before_other] ? Issued::kSame : Issued::kDifferent;
}

std::optional<std::string> find_disagreement(int rank, const std::string& lines, int other,
                                             const std::string& other_lines) {
  const auto theirs = parse(other_lines);
  for (const auto& [key, line] : parse(lines)) {
    const auto match = theirs.find(key);
    if (match == theirs.end() || match->second.fingerprint == line.fingerprint) continue;
    const bool first = rank < other;
    return concat("ranks disagree: rank ", first ? rank : other, " issues ",
                  first ? line.text : match->second.text, " but rank ", first ? other : rank,
                  " issues ", first ? match->second.text : line.text, " (group ", key.first, ")");
  }
  return std::nullopt;
}

std::string encode(const Pulse& pulse) {
  std::string text = std::to_string(pulse.beat);
  if (pulse.leaves) text += "\nleaves";
  if (!pulse.wait) return text;
  text += concat("\nwait\t", pulse.epoch, "\t", pulse.waits, "\t", hex(pulse.wait->group), "\t",
                 pulse.wait->sequence, "\t", pulse.wait->peer, "\t", pulse.cause, "\t",
                 pulse.wait->text);
  for (const IssuedHashes& issued : pulse.issued) {
    text += concat(issued.of_messages ? "\nposted\t" : "\nissued\t", hex(issued.group), "\t",
                   issued.count);
    const std::size_t most = issued.of_messages ? kPublishedMessages : kPublishedHashes;
    for (std::size_t i = 0; i < std::min(issued.latest.size(), most); ++i) {
      text += concat("\t", hex(issued.latest[i]));
    }
  }
  return text;
}

Pulse decode_pulse(const std::string& text) {
  Pulse pulse;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const auto fields = fields_of(line);
    if (fields[0] == "wait") {
      read_wait(fields, pulse);
    } else if (fields[0] == "issued" || fields[0] == "posted") {
      if (auto issued = read_issued(fields)) pulse.issued.push_back(*std::move(issued));
    } else if (fields[0] == "leaves") {
      pulse.leaves = true;
    } else {
      read(fields[0], pulse.beat);
    }
  }
  return pulse;
}

std::vector<int> watched_before(const std::vector<int>& ranks, int self) {
  const auto place = std::find(ranks.begin(), ranks.end(), self);
  if (place == ranks.end()) return {};
  const std::size_t size = ranks.size();
  const auto own = static_cast<std::size_t>(place - ranks.begin());
  std::vector<int> watched;
  for (std::size_t back = 1; back <= kWatchedBefore && back < size; ++back) {
    watched.push_back(ranks[(own + size - back) % size]);
  }
  return watched;
}

std::chrono::milliseconds watch_poll(int ranks) {
  return std::chrono::milliseconds(std::max(200, ranks));
}

std::chrono::milliseconds WatchTimes::words() const {
  return std::max(std::chrono::milliseconds(1000), 3 * poll);
}

std::chrono::milliseconds WatchTimes::explaining(std::chrono::milliseconds words) {
  constexpr std::chrono::milliseconds kAllKnow{10'000};
  return std::max(2 * words, std::min(6 * words, kAllKnow - words));
}

std::chrono::milliseconds WatchTimes::heartbeats() const {
  return std::max(std::chrono::milliseconds(1500), 3 * poll);
}

std::chrono::milliseconds WatchTimes::silent_after() const {
  return std::max(std::chrono::milliseconds(6000), 6 * poll);
}

std::chrono::milliseconds WatchTimes::telling() const {
  return std::max(std::chrono::milliseconds(2000), 3 * poll);
}

std::chrono::milliseconds WatchTimes::meeting() const {
  return std::max(std::chrono::milliseconds(3000), 6 * poll);
}

std::chrono::milliseconds WatchTimes::leaving() const {
  return std::max(std::chrono::milliseconds(5000), telling() + 2 * words());
}

std::chrono::milliseconds WatchTimes::pause() const { return poll / 12; }

std::optional<PeerWatch::Finding> PeerWatch::look(Time now, int epoch, const Standing& standing,
                                                  const std::function<std::string()>& lines) {
  // A rank that was stopped itself, or waited for a busy store, has not listened meanwhile.
  if (last_look_ && now - *last_look_ > options_.silent_after / 2) {
    heard_.clear();
    heard_behind_.clear();
  }
  last_look_ = now;
  if (std::exchange(epoch_, epoch) != epoch) suspected_.clear();
  listen(now, standing);
  const bool blocked = standing.waits > 0 && standing.waited >= options_.blocked_after;
  bool returns = false;
  // A short wait is no reason to read more than was read anyway.
  const auto chain = follow(now, standing, blocked ? kLongestChain : 1, returns);
  if (!blocked) return std::nullopt;
  if (auto silent = find_silent(now)) return silent;
  if (!standing.wait) return std::nullopt;
  answer(lines);
  if (auto left = find_left(now, standing)) return left;
  if (auto found = compare_with(standing.wait->peer, standing, lines)) return found;
  if (!returns) suspected_.clear();
  return returns ? find_deadlock(now, chain) : std::nullopt;
}

void PeerWatch::listen(Time now, const Standing& standing) {
  auto watched = watched_before(standing.peers, options_.rank);
  if (standing.wait && standing.wait->peer >= 0) watched.push_back(standing.wait->peer);
  watched.insert(watched.end(), standing.doubtful.begin(), standing.doubtful.end());
  std::sort(watched.begin(), watched.end());
  watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
  std::erase_if(heard_, [&](const auto& one) {
    return !std::binary_search(watched.begin(), watched.end(), one.first);
  });
  if (watched.empty()) return;
  std::vector<std::string> keys;
  for (const int rank : watched) keys.push_back(store_key::pulse(rank));
  const auto pulses = store_.find(keys);
  for (std::size_t i = 0; i < watched.size(); ++i) {
    hear(heard_, watched[i], pulses[i].value_or(""), now);
  }
}

void PeerWatch::hear(std::map<int, Heard>& heard, int rank, std::string text, Time now) {
  auto [one, first] = heard.try_emplace(rank, Heard{text, now, std::nullopt});
  if (one->second.text != text) one->second = {std::move(text), now, now};
}

std::optional<PeerWatch::Time> PeerWatch::last_beat(int rank) const {
  const auto heard = heard_.find(rank);
  return heard == heard_.end() ? std::nullopt : heard->second.last_beat;
}

std::optional<PeerWatch::Finding> PeerWatch::find_silent(Time now) const {
  std::vector<int> silent;
  for (const auto& [rank, heard] : heard_) {
    if (now - heard.since >= options_.silent_after) silent.push_back(rank);
  }
  if (silent.empty()) return std::nullopt;
  return Finding{Finding::What::kLost,
                 concat("rank ", joined(silent), silent.size() == 1 ? " has" : " have",
                        " given no sign of life for ", in_seconds(options_.silent_after))};
}

PeerWatch::Said PeerWatch::pulse_of(int rank, Time now) {
  auto heard = heard_.find(rank);
  if (heard == heard_.end()) {
    hear(heard_behind_, rank, store_.find({store_key::pulse(rank)}).front().value_or(""), now);
    heard = heard_behind_.find(rank);
  }
  const bool lately = now - heard->second.since < options_.silent_after / 3;
  return {decode_pulse(heard->second.text), lately};
}

std::vector<PeerWatch::Link> PeerWatch::follow(Time now, const Standing& standing, std::size_t most,
                                               bool& returns) {
  cause_ = -1;
  std::vector<Link> chain;
  if (!standing.wait || standing.wait->peer < 0) return chain;
  PeerWait wait = *standing.wait;
  int rank = options_.rank;
  std::string beat;
  bool one_wait = standing.waits == 1;
  std::set<int> followed;
  bool held_up = true;  // every rank so far by the next one, in any wait
  while (chain.size() < most && wait.peer >= 0) {
    if (held_up && wait.peer != options_.rank) cause_ = wait.peer;
    const auto [pulse, lately] = pulse_of(wait.peer, now);
    const bool seen = !followed.insert(wait.peer).second;
    const bool waits = pulse.wait && pulse.epoch == epoch_;
    const bool same = waits && pulse.wait->is_for_same(wait);
    held_up = held_up && waits && lately;
    if (held_up && pulse.cause >= 0 && pulse.cause != options_.rank) cause_ = pulse.cause;
    // Its data is on the way if it has issued this one and waits for something else; and another
    // thread of it may still issue it if that is not all that the rank does.
    if (!waits || (!same && (has_issued(pulse, wait) || pulse.waits != 1))) break;
    const int next = wait.peer;
    chain.push_back({rank, std::move(wait), !same, std::move(beat)});
    if (next == options_.rank) {
      returns = one_wait;
      break;
    }
    if (seen) break;  // a cycle of other ranks, which they find
    rank = next;
    wait = *pulse.wait;
    beat = std::to_string(pulse.beat);
  }
  std::erase_if(heard_behind_, [&](const auto& one) { return !followed.contains(one.first); });
  return chain;
}

std::optional<PeerWatch::Finding> PeerWatch::find_deadlock(Time now,
                                                           const std::vector<Link>& cycle) {
  std::vector<const Link*> links;
  for (const Link& link : cycle) {
    if (link.unissued) links.push_back(&link);
  }
  if (links.empty()) return std::nullopt;  // all in one collective: what they issued differs
  std::string seen;
  std::vector<std::string> beats;
  for (const Link& link : cycle) {
    seen +=
        concat(link.rank, " ", link.wait.group, " ", link.wait.sequence, " ", link.wait.peer, "\n");
    if (link.rank != options_.rank) beats.push_back(link.beat);
  }
  if (seen != suspected_) {
    suspected_ = std::move(seen);
    suspected_since_ = now;
    suspected_beats_ = std::move(beats);
    return std::nullopt;
  }
  // Ranks that no longer wait have not withdrawn what they said.
  const bool all_said_again =
      std::equal(beats.begin(), beats.end(), suspected_beats_.begin(), suspected_beats_.end(),
                 [](const std::string& later, const std::string& first) { return later != first; });
  if (!all_said_again || now - suspected_since_ < options_.blocked_after) return std::nullopt;
  // The text is the same on every rank of the cycle.
  std::rotate(links.begin(),
              std::min_element(links.begin(), links.end(),
                               [](const Link* a, const Link* b) { return a->rank < b->rank; }),
              links.end());
  std::string why = "ranks wait for each other:";
  for (const Link* link : links) {
    why += concat(link == links.front() ? " rank " : "; rank ", link->rank, " waits in ",
                  link->wait.text, ", which rank ", link->wait.peer, " has not issued");
  }
  return Finding{Finding::What::kDisagree,
                 why + "; issue collectives in the same order on every rank"};
}

std::optional<PeerWatch::Finding> PeerWatch::find_left(Time now, const Standing& standing) {
  const int peer = standing.wait->peer;
  const auto heard = heard_.find(peer);
  const bool leaves = heard != heard_.end() && decode_pulse(heard->second.text).leaves;
  if (!leaves) {
    left_.reset();
    return std::nullopt;
  }
  if (!left_ || left_->first != peer) left_ = {peer, now};
  if (now - left_->second < options_.blocked_after / 2) return std::nullopt;
  return Finding{Finding::What::kDisagree,
                 concat("rank ", peer, " has left: its World is closed, and rank ", options_.rank,
                        " waits for it in ", standing.wait->text,
                        "; make the same calls on every rank before one closes its World")};
}

std::optional<PeerWatch::Finding> PeerWatch::compare_with(
    int peer, const Standing& standing, const std::function<std::string()>& lines) {
  const auto heard = heard_.find(peer);
  if (peer < 0 || heard == heard_.end()) return std::nullopt;
  const Pulse pulse = decode_pulse(heard->second.text);
  const auto* mine = of_group(standing.issued, standing.wait->group);
  const auto* theirs = of_group(pulse.issued, standing.wait->group);
  if (!pulse.wait || pulse.epoch != epoch_ || mine == nullptr || theirs == nullptr) {
    return std::nullopt;
  }
  const bool same = mine->of_messages ? holds(*theirs, standing.wait->sequence)
                                      : compare(*mine, *theirs) == Issued::kSame;
  if (same) return std::nullopt;
  if (asked_ != std::pair(epoch_, peer)) {
    store_.set(store_key::asked(epoch_, peer), "here");
    asked_ = {epoch_, peer};
  }
  const auto text = store_.find({store_key::issued(epoch_, peer)}).front();
  if (!text) return std::nullopt;
  const auto why = find_disagreement(options_.rank, lines(), peer, *text);
  if (!why) return std::nullopt;
  return Finding{Finding::What::kDisagree, *why};
}

void PeerWatch::answer(const std::function<std::string()>& lines) {
  if (!store_.find({store_key::asked(epoch_, options_.rank)}).front()) return;
  std::pair<int, std::string> now{epoch_, lines()};
  if (now == published_) return;
  store_.set(store_key::issued(epoch_, options_.rank), now.second);
  published_ = std::move(now);
}

}  // namespace tessera::comm
