// Reducer: the reductions of units' gradients that are under way, oldest first.
//
// It keeps the memory that they use below a budget, by waiting for the oldest one. runtime.h
// decides when a reduction is issued, and bucket.h what it sends.
//
// On a device the host does not wait for that memory: it is free after the end of the reduction,
// and each later use is ordered after that end (buffer_pool.h). The rank's stream waits only where
// sums are read. The budget there counts units, since bytes that suit most units may be fewer than
// one large unit has: it is two units, one that is sent while the other one is computed.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "comm/group.h"
#include "comm/queue.h"
#include "comm/stream.h"

namespace tessera::fsdp {

class Unit;

class Reducer {
 public:
  /// Without `budget_bytes`: 32 MiB on the CPU.
  Reducer(std::optional<std::int64_t> budget_bytes, at::Device device)
      : device_(device), budget_(budget_bytes) {}

  /// Issues the reductions of the trainable buckets of one unit, group by group in their order,
  /// after those of its earlier micro-batches. `marks` go into the labels.
  void issue(comm::IssueQueue& queue, Unit& unit, const std::string& marks);
  /// Waits until the unit's wires are free.
  void free_wires(const Unit& unit);
  /// Waits until the unit's gradients of earlier micro-batches are summed, before they are read.
  void finish(const Unit& unit);
  void finish_all();
  /// Forgets the reductions under way without waiting for them; their results are lost.
  void drop(const Unit& unit);
  void drop_all();
  std::int64_t issued() const { return issued_; }  ///< number so far

 private:
  struct UnderWay {
    Unit* unit;
    comm::Group* group;  // the group of the unit's buckets that are in it
    comm::Pending work;
    std::int64_t bytes;
  };
  void issue(comm::IssueQueue& queue, Unit& unit, comm::Group* group, const std::string& marks);
  bool has_room_for(const Unit& unit, std::int64_t bytes) const;
  void free_oldest();
  void order_after() const;

  std::deque<UnderWay> under_way_;
  std::int64_t bytes_ = 0;
  const at::Device device_;
  const std::optional<std::int64_t> budget_;
  comm::Stream ended_;  // device only: ordered after the reductions that have ended
  std::int64_t issued_ = 0;
};

}  // namespace tessera::fsdp
