// Exchange: one batch under way as sends and receives between pairs of ranks.
//
// Posting and waiting only; what is posted for which collective is in the .cpp, op by op. Private
// to point_to_point.cpp. Threads: start() on the issuing thread, then wait() on one thread at a
// time.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/point_to_point.h"
#include "comm/sent_bytes.h"
#include "comm/sum.h"

namespace tessera::comm {

/// How to reach a peer: over which backend, and as which of its ranks.
struct Line {
  c10::intrusive_ptr<c10d::Backend> backend;  ///< null: not connected yet
  int rank = 0;
};

/// What all exchanges of a group share. A line is written once an epoch, by the issuing thread,
/// before the first exchange that needs it starts; threads that wait only read those of theirs.
/// All are taken back while nothing is under way (PointToPointGroup::reset).
class Channel {
 public:
  explicit Channel(ChannelOptions what);

  int size() const { return static_cast<int>(options.members.size()); }
  at::Tensor take_buffer(std::int64_t bytes);  ///< at least that many; contents undefined
  void give_back(at::Tensor buffer);

  const ChannelOptions options;
  const std::shared_ptr<IssueLog> log;
  std::vector<Line> lines;  ///< by index of the peer

 private:
  std::mutex mutex_;
  FreeBlocks free_buffers_{2.0};
};

/// Waits as long as words may be on their way (Patience::words), and on while the failure watch
/// waits for the store: it knows by the store's timeout that the store is gone. Errors: PeerLost
/// with what another rank has said in the meantime.
void hear_others(const Poison& poison, const WaitBoard& board);
/// "what: waited 100 s for rank 3; ...", and why, as far as `patience` knows.
std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience);

class Exchange final : public Work, private Blocked {
 public:
  Exchange(std::shared_ptr<Channel> channel, Batch batch, std::uint64_t sequence,
           std::uint64_t fingerprint);
  ~Exchange() override;

  /// Posts all transfers of the first phase. Errors: PeerLost.
  void start();
  void wait() override;

 private:
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
    bool finished = false;
  };
  /// One op's transfers, and where its peers' data is received before it is added.
  struct UnderWay {
    std::vector<Transfer> receives;
    std::vector<Transfer> sends;
    at::Tensor received;
    bool second_phase = false;
    std::vector<std::int64_t> begins = {};  ///< relayed parts in `received`, as relay::begins()
  };

  void abort() override;
  std::optional<PeerWait> waits_for() const override;

  /// Errors: PeerLost naming the peer, always.
  [[noreturn]] void blame(int peer, const std::exception& error) const;
  void post_receive(UnderWay& op, int peer, void* to, std::int64_t bytes, std::size_t index);
  void post_send(UnderWay& op, int peer, const void* from, std::int64_t bytes, std::size_t index);
  void post_receives(std::size_t index);
  void post_sends(std::size_t index);
  /// What each peer sends of an op whose addends are received beside its result.
  std::int64_t bytes_aside(std::size_t index) const;
  void copy_own_stretch(const AllToAll& op) const;
  void receive_aside(UnderWay& op, std::int64_t bytes, std::size_t index);

  void finish_first_phase(std::size_t index);
  void add_received(UnderWay& op, const void* own, at::ScalarType wire, const SumInto& result);
  void start_second_phase(std::size_t index);
  /// Relayed ops: all receives are posted at once, each round's send when what it passes on is
  /// here.
  bool is_relayed(std::size_t index) const;
  void prepare_relay(std::size_t index);
  void post_relayed_receives(std::size_t index);
  void send_round(std::size_t index, int round);
  void finish_relay(std::size_t index);
  void deliver_relayed(std::size_t index);
  Stretch relayed_part(std::size_t index, int round) const;  ///< what arrives, in `received`
  const void* combined_before(std::size_t index, int round) const;
  void combine_round(std::size_t index, int round);

  void finish(std::vector<Transfer>& transfers);
  void finish(Transfer& transfer);
  [[noreturn]] void fail(const Transfer& transfer, const std::string& what);
  /// World ranks for which a wait has timed out in `transfer`.
  std::vector<int> missing(const Transfer& transfer);
  std::vector<int> not_arrived();
  void release_buffers();

  /// What this rank sums of an all-reduced tensor, in two phases.
  Stretch own_stretch(const AllReduce& op) const;
  /// What went out is what sent_bytes() says: nobody else counts.
  void check_posted() const;
  int world_rank(int peer) const;
  std::string text() const;

  std::shared_ptr<Channel> channel_;
  Batch batch_;
  std::uint64_t sequence_;
  std::uint64_t fingerprint_;
  std::vector<UnderWay> under_way_;
  std::int64_t posted_bytes_ = 0;
  std::mutex mutex_;  // of under_way_'s lists, between wait() and abort()
  std::chrono::milliseconds patience_{0};
  std::chrono::steady_clock::time_point deadline_;
  std::atomic<int> waits_for_{-1};  // a peer
  bool done_ = false;
  std::exception_ptr failure_;
};

}  // namespace tessera::comm
