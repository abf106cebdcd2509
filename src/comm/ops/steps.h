// Steps: how one op of a batch travels as sends and receives between pairs of ranks.
//
// An op travels in rounds: all ops of a batch post their receives of the first one, then their
// sends; the thread that waits combines what has come and posts the next. Gloo's transport
// (backends/gloo/exchange.h) and that of ranks which share memory (backends/in_process/together.h)
// run the same steps; lines, tags, deadlines and errors are theirs. A small message is relayed
// (relay.h): all receives are posted at once, each round's send when what it passes on is here.
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

/// Where rank `peer`'s stretch begins among chunks of `counts`.
inline std::int64_t range_begin(const std::vector<std::int64_t>& counts, int peer) {
  return std::accumulate(counts.begin(), counts.begin() + peer, std::int64_t{0});
}

/// The transport of the steps of one op on one rank. Nothing is posted for 0 bytes. Between two
/// ranks one message travels in a round. A message of a rank to itself is copied: that rank posts
/// both ends, the receive first. Errors: LostRank.
class Transfers {
 public:
  virtual ~Transfers() = default;
  virtual int size() const = 0;
  virtual int self() const = 0;

  virtual void receive(int peer, void* to, std::int64_t bytes, int round) = 0;
  virtual void send(int peer, const void* from, std::int64_t bytes, int round) = 0;
  /// Receives `bytes` from each other rank in the first round, outside of the op's tensors. Where
  /// ranks share memory nothing is copied: combine() reads what was sent in its place.
  virtual void receive_addends(std::int64_t bytes) = 0;
  virtual const void* addend(int peer) = 0;  ///< for combine(): what `peer` sent so
  /// Takes memory for the op until it is done.
  virtual void take_aside(std::int64_t bytes) = 0;
  virtual std::byte* aside(std::int64_t offset) = 0;
  /// Lets combine() overwrite `memory`: no other rank reads it any more when this returns.
  virtual void before_overwriting(const void* memory, std::int64_t bytes) = 0;
};

/// The rounds of one op on one rank: each posts, then combines what it has received. Threads: the
/// first round is posted on the issuing thread, the rest happens on one that waits.
class Steps {
 public:
  virtual ~Steps() = default;
  virtual int rounds(int /*ranks*/) const { return 1; }
  /// May post what later rounds receive, too.
  virtual void post_receives(Transfers& transfers, int round) = 0;
  virtual void post_sends(Transfers& transfers, int round) = 0;
  virtual void combine(Transfers& /*transfers*/, int /*round*/) {}
};

/// For each rank but this one, in the order in which none is everyone's first.
template <class Act>
void for_successors(const Transfers& transfers, Act act) {
  for (int step = 1; step < transfers.size(); ++step) {
    act((transfers.self() + step) % transfers.size());
  }
}

/// For each rank but this one, ascending.
template <class Act>
void for_others(const Transfers& transfers, Act act) {
  for (int peer = 0; peer < transfers.size(); ++peer) {
    if (peer != transfers.self()) act(peer);
  }
}

/// Adds `own` and what receive_addends() has brought, in rank order.
void add_addends(Transfers& transfers, const void* own, at::ScalarType wire,
                 const kernels::HostSum& result);

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
  virtual void prepare(Transfers& transfers) = 0;
  /// Returns the bytes aside into which a round receives.
  virtual layout::Range arriving(Transfers& transfers, int round) const = 0;
  virtual Sent sent(Transfers& transfers, int round) const = 0;
  virtual void take_in(Transfers& /*transfers*/, int /*round*/) {}  ///< it has arrived
  virtual void deliver(Transfers& transfers) = 0;                   ///< after the last round
};

/// Sends every rank's part to every rank.
class RelayedGatherSteps : public RelayedSteps {
 public:
  /// This rank's part begins at byte `own` of `tensor`, which outlives this. Rank r's is lengths[r]
  /// bytes long.
  RelayedGatherSteps(const at::Tensor& tensor, std::vector<std::int64_t> lengths, std::int64_t own)
      : tensor_(tensor), lengths_(std::move(lengths)), own_(own) {}

 protected:
  std::byte* part_of(Transfers& transfers, int rank) const;

 private:
  void prepare(Transfers& transfers) final;
  layout::Range arriving(Transfers& transfers, int round) const final;
  Sent sent(Transfers& transfers, int round) const final;

  const at::Tensor& tensor_;
  const std::vector<std::int64_t> lengths_;
  const std::int64_t own_;
  std::vector<std::int64_t> begins_;  ///< of parts aside, as relay::begins()
};

}  // namespace tessera::comm
