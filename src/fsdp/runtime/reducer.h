// Reducer: the reductions of units' gradients that are under way, oldest first.
//
// It keeps the memory that they use below a budget, by waiting for the oldest one. runtime.h
// decides when a reduction is issued, and bucket.h what it sends.
//
// On a device the host does not wait for memory: each later use of it is ordered after the end of
// the reduction (buffer_pool.h). The rank's stream waits only where sums are read. The default
// budget there is two units, of which one is sent while the other is computed: a number of bytes
// that suits most units may be too small for one large unit.
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
  /// Without `budget_bytes`: 32 MiB on the CPU, two units on a device.
  Reducer(std::optional<std::int64_t> budget_bytes, at::Device device)
      : device_(device), budget_(budget_bytes) {}

  /// Issues the reductions of the unit's trainable buckets, one batch for each group. Those of its
  /// earlier micro-batches must have ended (free_wires()). `marks` go into the labels.
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
    comm::Group* group;  // the group of the buckets that are reduced
    comm::Pending work;
    std::int64_t bytes;
  };
  void issue(comm::IssueQueue& queue, Unit& unit, comm::Group* group, const std::string& marks);
  bool has_room_for(const Unit& unit, std::int64_t bytes) const;
  void free_oldest();
  /// Orders the current stream after the reductions that have ended.
  void order_after_reductions() const;

  std::deque<UnderWay> under_way_;
  std::int64_t bytes_ = 0;
  const at::Device device_;
  const std::optional<std::int64_t> budget_;
  comm::Stream ended_;  // device only: ordered after the reductions that have ended
  std::int64_t issued_ = 0;
};

}  // namespace tessera::fsdp
