#include "launch/order_log.h"

#include <algorithm>

namespace tessera::comm {

void OrderLog::clear() {
  const base::Lock lock(mutex_);
  first_ = count_;
  issues_.clear();
}

std::vector<LoggedIssue> OrderLog::latest(std::size_t most) const {
  const base::Lock lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>({count_ - first_, ring_.size(), most});
  std::vector<LoggedIssue> latest;
  latest.reserve(kept);
  for (std::uint64_t i = count_ - kept; i < count_; ++i) latest.push_back(ring_[i % ring_.size()]);
  return latest;
}

std::optional<IssueWords> OrderLog::words(std::uint64_t what) const {
  std::shared_ptr<const Issue> issue;
  {
    const base::Lock lock(mutex_);
    if (const auto found = issues_.find(what); found != issues_.end()) issue = found->second;
  }
  if (!issue) return std::nullopt;
  return issue->words();
}

}  // namespace tessera::comm
