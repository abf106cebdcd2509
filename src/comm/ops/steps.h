// Steps: how one op of a batch travels as sends and receives between pairs of ranks.
//
// All ops of a batch prepare, then post their receives, then their sends; whoever waits lets each
// finish what is left (additions, further rounds), then waits for what was posted. Lines, tags,
// deadlines and errors are the transport's (backends/gloo/exchange.h), behind Transfers. A small
// message is relayed (relay.h): all receives are posted at once, each round's send when what it
// passes on is here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
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

/// Where rank `peer`'s stretch begins among stretches of `counts`.
inline std::int64_t stretch_begin(const std::vector<std::int64_t>& counts, int peer) {
  return std::accumulate(counts.begin(), counts.begin() + peer, std::int64_t{0});
}

/// What the steps of one op may ask of the transport. Nothing is posted for 0 bytes. A phase
/// numbers what travels between the same two ranks. Errors: LostRank.
class Transfers {
 public:
  virtual ~Transfers() = default;
  virtual int size() const = 0;
  virtual int self() const = 0;

  virtual void receive(int peer, void* to, std::int64_t bytes, int phase) = 0;
  virtual void send(int peer, const void* from, std::int64_t bytes, int phase) = 0;
  /// Memory of the op for what it receives beside its tensors, until it is done.
  virtual void take_aside(std::int64_t bytes) = 0;
  virtual std::byte* aside(std::int64_t offset) = 0;

  virtual void finish_receive(std::size_t index) = 0;  ///< in the order in which they were posted
  virtual void finish_receives() = 0;
  virtual void finish_sends() = 0;

  enum class Earlier : std::uint8_t { kKept, kFinished };
  /// Runs `post`, which may post more, unless the World is aborted. kFinished: all that was posted
  /// so far has been waited for.
  virtual void post_more(Earlier earlier, const std::function<void()>& post) = 0;
};

/// Threads: as Exchange: posting on the issuing thread, then finish() on one that waits.
class Steps {
 public:
  virtual ~Steps() = default;
  virtual void prepare(Transfers& /*transfers*/) {}
  virtual void post_receives(Transfers& transfers) = 0;
  virtual void post_sends(Transfers& transfers) = 0;
  virtual void finish(Transfers& /*transfers*/) {}
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

/// Receives so many bytes from each other rank beside the result.
void receive_aside(Transfers& transfers, std::int64_t bytes);
/// Adds them and `own`, in rank order.
void add_received(Transfers& transfers, const void* own, at::ScalarType wire,
                  const kernels::HostSum& result);

class RelayedSteps : public Steps {
 public:
  void post_receives(Transfers& transfers) final;
  void post_sends(Transfers& transfers) final { send_round(transfers, 0); }
  void finish(Transfers& transfers) final;

 protected:
  struct Sent {
    const void* from;
    std::int64_t bytes;
  };
  /// What arrives in a round, in bytes aside.
  virtual layout::Range arriving(Transfers& transfers, int round) const = 0;
  virtual Sent sent(Transfers& transfers, int round) const = 0;
  virtual void combine(Transfers& /*transfers*/, int /*round*/) {}  ///< it has arrived
  virtual void deliver(Transfers& transfers) = 0;                   ///< after the last round

 private:
  void send_round(Transfers& transfers, int round) const;
};

/// Everyone's part to everyone.
class RelayedGatherSteps : public RelayedSteps {
 public:
  /// This rank's part begins at byte `own` of `tensor`, which outlives this. Rank r's is lengths[r]
  /// bytes long.
  RelayedGatherSteps(const at::Tensor& tensor, std::vector<std::int64_t> lengths, std::int64_t own)
      : tensor_(tensor), lengths_(std::move(lengths)), own_(own) {}
  void prepare(Transfers& transfers) final;

 protected:
  std::byte* part_of(Transfers& transfers, int rank) const;

 private:
  layout::Range arriving(Transfers& transfers, int round) const final;
  Sent sent(Transfers& transfers, int round) const final;

  const at::Tensor& tensor_;
  const std::vector<std::int64_t> lengths_;
  const std::int64_t own_;
  std::vector<std::int64_t> begins_;  ///< of parts aside, as relay::begins()
};

}  // namespace tessera::comm
