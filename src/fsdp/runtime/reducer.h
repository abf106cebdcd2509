// Reducer: the reductions of units' gradients that are under way, oldest first.
//
// It keeps what they occupy below a budget by waiting for the oldest; which reduction goes out
// when is decided by runtime.h, what it carries by bucket.h.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "comm/group.h"
#include "comm/queue.h"

namespace tessera::fsdp {

class Unit;

class Reducer {
 public:
  explicit Reducer(std::int64_t budget_bytes) : budget_(budget_bytes) {}

  /// The trainable buckets of one unit, group by group in their order, after what earlier
  /// micro-batches of it left. `marks` go into the labels.
  void issue(comm::IssueQueue& queue, Unit& unit, const std::string& marks);
  /// Waits until the unit's gradients of earlier micro-batches are summed.
  void finish(const Unit& unit);
  void finish_all();
  /// Nothing is waited for: what was under way is lost.
  void drop(const Unit& unit);
  void drop_all();
  std::int64_t issued() const { return issued_; }  ///< so far

 private:
  struct UnderWay {
    Unit* unit;
    comm::Group* group;  // of the unit's buckets that it carries
    comm::Pending work;
    std::int64_t bytes;
  };
  void issue(comm::IssueQueue& queue, Unit& unit, comm::Group* group, const std::string& marks);
  void finish_oldest();

  std::deque<UnderWay> under_way_;
  std::int64_t bytes_ = 0;
  const std::int64_t budget_;
  std::int64_t issued_ = 0;
};

}  // namespace tessera::fsdp
