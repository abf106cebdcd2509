// Arrivals: who has come to a meeting of many ranks, as bitmaps in the store.
//
// Each counter holds the bits of 62 members; who fills one adds its bit to a counter of such
// counters, and so on up to a single one. So coming takes O(1) requests and log N for few, the last
// one to come knows that it is, and who is missing is read from the top: only counters that are not
// full are asked for, and no more of them than a bound, however many ranks ask at once. Pure.
// Next: store.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

/// Counters by key, shared by all ranks: 0 at first.
class SharedCounters {
 public:
  virtual ~SharedCounters() = default;
  /// Returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t what) = 0;
};

struct Missing {
  std::vector<int> members;  ///< ascending
  bool and_more = false;     ///< too many to ask for
};

class Arrivals {
 public:
  Arrivals(SharedCounters& counters, std::string key, int members);

  /// Once or more; returns whether this one was the last of all.
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
  std::vector<Level> levels_;  ///< the members' first
};

}  // namespace tessera::comm
