// Steps: the sends and receives between pairs of ranks by which one op of a batch travels.
//
// An op travels in rounds. All ops of a batch post the receives of the first round, then the sends
// of that round. The thread that waits combines what has arrived and posts the next round. Two
// transports run the same steps: Gloo's (backends/gloo/exchange.h), and the one of ranks that share
// memory (backends/in_process/together.h). Connections, tags, deadlines and errors belong to the
// transport. A relayed op (relay.h) posts all of its receives at once, and the send of a round when
// the parts that it passes on have arrived.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "comm/ops/operation.h"
#include "kernels/host_sum.h"
#include "layout/range.h"

namespace tessera::comm {

inline std::byte* at_byte(const at::Tensor& tensor, std::int64_t offset) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + offset;
}

inline std::int64_t nbytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

/// The element at which rank `peer`'s range begins, where rank r's range has counts[r] elements.
inline std::int64_t range_begin(const std::vector<std::int64_t>& counts, int peer) {
  return std::accumulate(counts.begin(), counts.begin() + peer, std::int64_t{0});
}

/// Transports the steps of one op on one rank. In each round a rank sends at most one message to
/// each other rank, and none of 0 bytes. A message from a rank to itself is a copy: the rank posts
/// both ends, the receive first. Errors: LostRank.
class Transfers {
 public:
  virtual ~Transfers() = default;
  virtual int size() const = 0;
  virtual int self() const = 0;

  virtual void receive(int peer, void* to, std::int64_t bytes, int round) = 0;
  virtual void send(int peer, const void* from, std::int64_t bytes, int round) = 0;
  /// Receives `bytes` from each other rank in the first round, into memory outside of the op's
  /// tensors. Ranks that share memory copy nothing: addend() is the sender's own memory.
  virtual void receive_addends(std::int64_t bytes) = 0;
  /// The addends that receive_addends() has received from `peer`; called by combine().
  virtual const void* addend(int peer) = 0;
  /// Takes scratch memory, which the op has until it ends.
  virtual void take_aside(std::int64_t bytes) = 0;
  /// The scratch memory from byte `offset` on.
  virtual std::byte* aside(std::int64_t offset) = 0;
  /// Returns when no other rank reads `memory` any more, so that combine() may overwrite it.
  virtual void before_overwriting(const void* memory, std::int64_t bytes) = 0;
};

/// The rounds of one op on one rank. Each round posts receives and sends, then combines what has
/// arrived. Threads: the issuing thread posts the first round; a thread that waits does the rest.
class Steps {
 public:
  virtual ~Steps() = default;
  virtual int rounds(int /*ranks*/) const { return 1; }
  /// May also post the receives of later rounds.
  virtual void post_receives(Transfers& transfers, int round) = 0;
  virtual void post_sends(Transfers& transfers, int round) = 0;
  virtual void combine(Transfers& /*transfers*/, int /*round*/) {}
};

/// Calls `act` for every other rank, beginning with the one after this rank: if all ranks began
/// with rank 0, all would send to it at the same time.
template <class Act>
void for_successors(const Transfers& transfers, Act act) {
  for (int step = 1; step < transfers.size(); ++step) {
    act((transfers.self() + step) % transfers.size());
  }
}

/// Calls `act` for every other rank, ascending.
template <class Act>
void for_others(const Transfers& transfers, Act act) {
  for (int peer = 0; peer < transfers.size(); ++peer) {
    if (peer != transfers.self()) act(peer);
  }
}

/// Adds `own`, this rank's addends, and those that receive_addends() has received, in rank order.
void sum_addends(Transfers& transfers, const void* own, at::ScalarType wire,
                 const kernels::HostSum& result);

/// The steps of a relayed op (relay.h). A subclass says which bytes each round sends, and where
/// each round receives.
class RelayedSteps : public Steps {
 public:
  int rounds(int ranks) const final;
  void post_receives(Transfers& transfers, int round) final;
  void post_sends(Transfers& transfers, int round) final;
  void combine(Transfers& transfers, int round) final;

 protected:
  struct Sent {
    const void* from;
    std::int64_t bytes;
  };
  virtual void prepare(Transfers& transfers) = 0;  ///< takes scratch memory, before the first round
  /// The range of the scratch memory, in bytes, into which a round receives.
  virtual layout::Range arriving(Transfers& transfers, int round) const = 0;
  virtual Sent sent(Transfers& transfers, int round) const = 0;
  /// Combines what a round has received.
  virtual void take_in(Transfers& /*transfers*/, int /*round*/) {}
  virtual void deliver(Transfers& transfers) = 0;  ///< writes the result, after the last round
};

/// Sends every rank's part to every rank.
class RelayedGatherSteps : public RelayedSteps {
 public:
  /// The part of this rank begins at byte `own` of `tensor`, which must outlive this object. The
  /// part of rank r has lengths[r] bytes.
  RelayedGatherSteps(const at::Tensor& tensor, std::vector<std::int64_t> lengths, std::int64_t own)
      : tensor_(tensor), lengths_(std::move(lengths)), own_(own) {}

 protected:
  /// The received part of `rank`, in the scratch memory.
  std::byte* part_of(Transfers& transfers, int rank) const;

 private:
  void prepare(Transfers& transfers) final;
  layout::Range arriving(Transfers& transfers, int round) const final;
  Sent sent(Transfers& transfers, int round) const final;

  const at::Tensor& tensor_;
  const std::vector<std::int64_t> lengths_;
  const std::int64_t own_;
  std::vector<std::int64_t> begins_;  ///< relay::begins() of the parts in the scratch memory
};

}  // namespace tessera::comm
