// Arrivals: which ranks have come to a meeting of many, as bitmaps in the store.
//
// Each counter holds the bits of 62 members; the member that fills one adds its bit to a counter of
// such counters, and so on up to a single one. So arriving takes O(1) requests, and log N for few
// members; the last one to arrive knows that it is, and the missing ones are read from the top:
// only counters that are not full are read, and no more of them than a bound, however many ranks
// ask at once. Pure. Next: store.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

/// Counters by key, shared by all ranks; all are 0 at first.
class SharedCounters {
 public:
  virtual ~SharedCounters() = default;
  /// Returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t what) = 0;
};

struct Missing {
  std::vector<int> members;  ///< ascending
  bool and_more = false;     ///< whether there are too many to ask for
};

class Arrivals {
 public:
  Arrivals(SharedCounters& counters, std::string key, int members);

  /// May be called repeatedly; returns whether this member was the last of all.
  bool arrive(int member);
  Missing missing();

 private:
  struct Level {
    int places;  ///< bits of all its counters
    int counters;
  };
  std::string key_of(std::size_t level, int counter) const;
  std::int64_t full(std::size_t level, int counter) const;
  void find_missing(std::size_t level, int counter, int& may_ask, Missing& found);

  SharedCounters& counters_;
  const std::string key_;
  std::vector<Level> levels_;  ///< the first level is the members'
};

}  // namespace tessera::comm
