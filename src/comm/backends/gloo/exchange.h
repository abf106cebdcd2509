// Exchange: one batch under way as sends and receives between pairs of ranks.
//
// Posting and waiting only: what is posted for which collective, its op says (ops/steps.h). Private
// to point_to_point.cpp. Threads: start() on the issuing thread, then wait() on one thread at a
// time.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/gloo/point_to_point.h"
#include "comm/batch.h"
#include "comm/buffer_pool.h"
#include "comm/ops/steps.h"

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
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int size() const { return static_cast<int>(options.members.size()); }
  at::Tensor take_buffer(std::int64_t bytes);  ///< at least that many; contents undefined
  void give_back(at::Tensor buffer);

  const ChannelOptions options;
  const std::shared_ptr<FlightRecorder> log;
  std::vector<Line> lines;  ///< by index of the peer

 private:
  base::Mutex mutex_;
  FreeBlocks free_buffers_ TESSERA_GUARDED_BY(mutex_){2.0};
};

/// Waits as long as words may be on their way (Patience::words) before `peer`, a world rank, is
/// blamed; and on while the failure watch waits for the store of another rank: it knows by the
/// store's timeout that the store is gone. With the `deadline` of a wait that a closed connection
/// has ended: while the peer continues to beat, as long again after the deadline, but no longer
/// than WatchTimes::explaining(), since a peer that lives will say why it has closed its
/// connections. Returns whether the deadline is over and the peer lives: then it is late, and not
/// lost. Errors: LostRank with what another rank has said in the meantime.
bool hear_others(const AbortFlag& abort_flag, WaitBoard& board, int peer,
                 std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);
/// "what: waited 100 s for rank 3; ...", and why, as far as `patience` knows. No ranks: all have
/// come after all, as to one that was stopped for longer than it waits.
std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience);

/// Gloo's message without the place in its source and without its advice.
std::string gloo_reason(const std::string& error);

class Exchange final : public Work, private Blocked {
 public:
  /// `of` is the entry of the log for which this goes out; `fingerprint` is in the tags.
  Exchange(std::shared_ptr<Channel> channel, Batch batch, std::shared_ptr<const Entry> of,
           std::uint64_t fingerprint);
  ~Exchange() override;

  /// Posts all transfers of the first phase. Errors: LostRank.
  void start();
  void wait() override;

 private:
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
    bool finished = false;
  };
  /// One op's transfers, and what its steps may ask for.
  class UnderWay final : public Transfers {
   public:
    UnderWay(Exchange& exchange, std::size_t index, std::unique_ptr<Steps> what)
        : steps(std::move(what)), exchange_(exchange), index_(index) {}

    int size() const override;
    int self() const override;
    void receive(int peer, void* to, std::int64_t bytes, int phase) override;
    void send(int peer, const void* from, std::int64_t bytes, int phase) override;
    void take_aside(std::int64_t bytes) override;
    std::byte* aside(std::int64_t offset) override;
    void finish_receive(std::size_t index) override;
    void finish_receives() override;
    void finish_sends() override;
    void post_more(Earlier earlier, const std::function<void()>& post) override;

    std::unique_ptr<Steps> steps;
    std::vector<Transfer> receives;
    std::vector<Transfer> sends;
    at::Tensor received;

   private:
    int tag_of(int phase) const;

    Exchange& exchange_;
    const std::size_t index_;
  };

  void abort() override;
  std::optional<PeerWait> waits_for() const override;

  /// Runs what posts transfers. Errors: LostRank.
  template <class Post>
  void posting(const Post& post);
  /// Errors: LostRank, always: what others say, else that the wait was in vain where it is over and
  /// the peer lives, else `lost`.
  [[noreturn]] void blame(int peer, const std::string& lost);
  [[noreturn]] void blame_cause(int peer) const;
  void begin_wait();
  void finish(std::vector<Transfer>& transfers);
  void finish(Transfer& transfer);
  [[noreturn]] void fail(const Transfer& transfer, const std::string& what);
  /// Whether this rank may wait for one that itself waits for another.
  bool is_relayed() const;
  /// World ranks whose transfers are not there after a timeout.
  std::vector<int> not_arrived();
  void release_buffers();

  /// What went out is what sent_bytes() says: nobody else counts.
  void check_posted() const;
  int world_rank(int peer) const;
  std::string text() const;

  std::shared_ptr<Channel> channel_;
  Batch batch_;
  const std::shared_ptr<const Entry> of_;
  std::uint64_t fingerprint_;
  std::deque<UnderWay> under_way_;
  std::int64_t posted_bytes_ = 0;
  base::Mutex mutex_;                      // of under_way_'s lists, between wait() and abort()
  std::chrono::milliseconds patience_{0};  // of wait(), or of a post of start() that has failed
  std::chrono::steady_clock::time_point deadline_;
  std::atomic<int> waits_for_{-1};  // a peer
  bool done_ = false;
  std::exception_ptr failure_;
};

}  // namespace tessera::comm
