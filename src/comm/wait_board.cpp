#include "comm/wait_board.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "tessera/error.h"

namespace tessera::comm {

std::uint64_t IssueLog::record(const Batch& batch, std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[count_++ % ring_.size()];
  describe(batch, sequence, entry);
  return entry.fingerprint;
}

void IssueLog::clear() {
  const std::lock_guard lock(mutex_);
  count_ = 0;
}

std::string IssueLog::lines() const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>(count_, ring_.size());
  std::string text;
  for (std::uint64_t i = count_ - kept; i < count_; ++i) {
    const Entry& entry = ring_[i % ring_.size()];
    text +=
        concat(group_, "\t", entry.sequence, "\t", entry.fingerprint, "\t", to_string(entry), "\n");
  }
  return text;
}

namespace {

struct Line {
  std::string fingerprint;
  std::string text;
};

/// (group, sequence) -> line. Lines that do not parse are left out: they come from another process.
std::map<std::pair<std::string, std::uint64_t>, Line> parse(const std::string& lines) {
  std::map<std::pair<std::string, std::uint64_t>, Line> parsed;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string group;
    std::string sequence;
    Line rest;
    if (!std::getline(fields, group, '\t') || !std::getline(fields, sequence, '\t') ||
        !std::getline(fields, rest.fingerprint, '\t') || !std::getline(fields, rest.text) ||
        sequence.empty() || sequence.size() > 19 ||
        sequence.find_first_not_of("0123456789") != std::string::npos) {
      continue;
    }
    parsed[{group, std::stoull(sequence)}] = rest;
  }
  return parsed;
}

}  // namespace

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

void WaitBoard::enter(Blocked& wait) {
  const std::lock_guard lock(mutex_);
  waits_.push_back({&wait, std::chrono::steady_clock::now()});
}

void WaitBoard::leave(Blocked& wait) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Item& item) { return item.wait == &wait; });
}

void WaitBoard::abort_all() {
  const std::lock_guard lock(mutex_);
  for (const Item& item : waits_) item.wait->abort();
}

std::optional<std::chrono::milliseconds> WaitBoard::longest_wait() const {
  const std::lock_guard lock(mutex_);
  if (waits_.empty()) return std::nullopt;
  auto oldest = waits_.front().since;
  for (const Item& item : waits_) oldest = std::min(oldest, item.since);
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                               oldest);
}

void WaitBoard::add(std::shared_ptr<IssueLog> log) {
  const std::lock_guard lock(mutex_);
  logs_.push_back(std::move(log));
}

std::string WaitBoard::lines() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& log : logs_) text += log->lines();
  return text;
}

std::vector<int> WaitBoard::peers() const {
  const std::lock_guard lock(mutex_);
  std::set<int> ranks;
  for (const auto& log : logs_) ranks.insert(log->members().begin(), log->members().end());
  return {ranks.begin(), ranks.end()};
}

}  // namespace tessera::comm
