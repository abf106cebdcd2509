// Reducer: the reductions of units' gradients that are under way, oldest first.
//
// It keeps what they occupy below a budget by waiting for the oldest; which reduction goes out
// when is decided by runtime.h, what it carries by bucket.h.
//
// On a device nobody waits where memory is wanted back: it is free behind the end of the reduction,
// whoever takes it comes behind that (buffer_pool.h), and the rank's own stream only where sums are
// read. There bytes say little, since one unit may have more than any number that suits the others:
// the budget is two units, of which one is sent while the other one is computed.
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

  /// The trainable buckets of one unit, group by group in their order, after what earlier
  /// micro-batches of it left. `marks` go into the labels.
  void issue(comm::IssueQueue& queue, Unit& unit, const std::string& marks);
  /// Until the unit's wires are back.
  void free_wires(const Unit& unit);
  /// Until the unit's gradients of earlier micro-batches are summed, for who reads them next.
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
  bool has_room_for(const Unit& unit, std::int64_t bytes) const;
  void free_oldest();
  void order_after() const;

  std::deque<UnderWay> under_way_;
  std::int64_t bytes_ = 0;
  const at::Device device_;
  const std::optional<std::int64_t> budget_;
  comm::Stream ended_;  // of a device: behind those that were under way, and nothing else
  std::int64_t issued_ = 0;
};

}  // namespace tessera::fsdp
