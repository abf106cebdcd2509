#include "launch/arrivals.h"

#include <algorithm>
#include <utility>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr int kBits = 62;  // so that sums stay positive

// When a meeting of a thousand ranks fails, most of them ask at the same time which ranks are
// missing.
constexpr int kCountersAsked = 16;

std::int64_t bit_of(int place) { return std::int64_t{1} << place % kBits; }

}  // namespace

Arrivals::Arrivals(SharedCounters& counters, std::string key, int members)
    : counters_(counters), key_(std::move(key)) {
  for (int places = members;; places = levels_.back().counters) {
    levels_.push_back({places, (places + kBits - 1) / kBits});
    if (levels_.back().counters <= 1) return;
  }
}

std::string Arrivals::key_of(std::size_t level, int counter) const {
  return concat(key_, "/", level, "/", counter);
}

std::int64_t Arrivals::full(std::size_t level, int counter) const {
  const int places = std::min(kBits, levels_[level].places - counter * kBits);
  return (std::int64_t{1} << places) - 1;
}

bool Arrivals::arrive(int member) {
  // A rank that comes again, after a timeout, counts once.
  if ((counters_.add(key_of(0, member / kBits), 0) & bit_of(member)) != 0) return false;
  int place = member;
  for (std::size_t level = 0; level < levels_.size(); ++level) {
    const int counter = place / kBits;
    if (counters_.add(key_of(level, counter), bit_of(place)) != full(level, counter)) return false;
    place = counter;
  }
  return true;
}

Missing Arrivals::missing() {
  Missing found;
  int may_ask = kCountersAsked;
  find_missing(levels_.size() - 1, 0, may_ask, found);
  return found;
}

void Arrivals::find_missing(std::size_t level, int counter, int& may_ask, Missing& found) {
  if (may_ask == 0) {
    found.and_more = true;
    return;
  }
  --may_ask;
  const std::int64_t absent = full(level, counter) & ~counters_.add(key_of(level, counter), 0);
  for (int bit = 0; bit < kBits; ++bit) {
    if ((absent >> bit & 1) == 0) continue;
    const int place = counter * kBits + bit;
    if (level == 0) {
      found.members.push_back(place);
    } else {
      find_missing(level - 1, place, may_ask, found);
    }
  }
}

}  // namespace tessera::comm
