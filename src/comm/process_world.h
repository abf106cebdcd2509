// What a World keeps besides its place, and ProcessWorld, whose ranks are processes. Private to
// comm/.
//
// Store, watch and the connections of a backend. How it ends well and how it ends badly are two
// different things: the destructor leaves together with the others, report_failure() leaves alone.
// Next: failure_report.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/backend.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "launch/abort_flag.h"
#include "launch/failure_record.h"
#include "launch/failure_watch.h"
#include "launch/launch_environment.h"
#include "launch/rank_board.h"
#include "launch/store.h"
#include "launch/wait_board.h"
#include "tessera/world.h"

namespace tessera {

/// Groups, and the mark that it has failed.
struct World::State {
  base::Mutex mutex;
  base::Condition made_one;
  bool making TESSERA_GUARDED_BY(mutex) = false;
  std::map<std::string, std::shared_ptr<comm::Group>> made TESSERA_GUARDED_BY(mutex);
  /// Of groups on a device, by their ranks.
  std::map<std::vector<int>, comm::Stream> streams TESSERA_GUARDED_BY(mutex);
  const std::shared_ptr<comm::AbortFlag> abort_flag = std::make_shared<comm::AbortFlag>();
  const std::shared_ptr<comm::WaitBoard> board = std::make_shared<comm::WaitBoard>();
  std::shared_ptr<comm::Store> store;  ///< none in a world of one
  std::chrono::milliseconds init_timeout{0};
  std::unique_ptr<comm::StartUpLog> start_up_log;  ///< of rank 0, in a start-up
  at::Device device{at::kCPU};
  std::shared_ptr<comm::HostWaits> host_waits;  ///< none on the CPU

  /// The right of one thread to look up and make a group; other threads wait for it. The mutex is
  /// free meanwhile: connecting takes as long as the other ranks do, which may need an answer from
  /// another thread of this rank first.
  class Making {
   public:
    /// Waits while another thread makes one. Errors: what the interrupt check throws.
    Making(State& state, std::string name);
    ~Making();
    Making(const Making&) = delete;
    Making& operator=(const Making&) = delete;

    const std::shared_ptr<comm::Group>& made() const { return made_; }  ///< null: it is to be made
    std::shared_ptr<comm::Group> keep(std::shared_ptr<comm::Group> group) const;
    comm::Stream stream_of(const std::vector<int>& ranks, const at::Device& where) const;

   private:
    State& state_;
    const std::string name_;
    std::shared_ptr<comm::Group> made_;
    bool makes_ = false;
  };
};

}  // namespace tessera

namespace tessera::comm {

/// Why a rank aborts its World before it recovers: whoever still waits for it is to leave, too.
inline constexpr const char* kRecovers = "recovers from an error of its own";
/// Other ranks hear this where the interrupt check of a rank has thrown.
inline constexpr const char* kInterrupted = "interrupted while it waited for other ranks";

class ProcessWorld : public World {
 public:
  /// Collective. `store`: null: the one that the launch names. Errors: kComm when the others do not
  /// come in time.
  ProcessWorld(const LaunchEnvironment& launch, const WorldOptions& options,
               std::shared_ptr<Store> store = nullptr);
  ~ProcessWorld() override;

  std::string backend() const override { return std::string(backend_.name); }
  void close() override;
  void close_failed(const std::string& why) override;
  void abort_epoch(std::uint64_t epoch, const std::string& why) override;
  void recover() override;

  /// Writes the failure key unless it is there. Returns what stands there; none when the store is
  /// gone, or gives no answer soon.
  std::optional<FailureRecord> announce_failure(const FailureRecord& failure) noexcept;
  std::optional<FailureRecord> known_failure() noexcept;
  /// The same for a rank that was stopped. Where another rank's word has aborted the World, that
  /// rank's error is on its way through its stack: waited for as long as words may take.
  std::optional<FailureRecord> failure_behind() noexcept;
  /// Whether `error` says that ranks have called different things, for which the World is aborted.
  /// Every rank has that error as its own, wherever it was found; a rank that is lost before the
  /// recovery is another matter.
  bool is_disagreement(const std::exception& error) const;
  /// Where this rank stands is as it is now, though its waits end.
  void keep_board() noexcept { state_->board->freeze(); }
  /// Puts where this rank stands into the store, once an epoch, for the one that reports.
  void publish_board() noexcept;
  /// Why the run hangs or was lost, by what all ranks have said (hang_finder.h); "" where the
  /// store cannot tell. Takes as long as words may take.
  std::string hang_report() noexcept;
  /// comm/failure_report.h.
  void when_refused(std::function<void()> undo);
  void refused() noexcept;
  /// Where this process serves the store: until the others have read what it says.
  void stay_for_readers() const noexcept;

 protected:
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const at::Device& where) override;

 private:
  /// The cause of the abort in this epoch: an error of this rank, a message of another one, or a
  /// watch that found ranks to disagree.
  enum class Aborter : std::uint8_t { kNone, kSelf, kOther, kDisagreement };
  /// A child of fork() has none of the threads, and shares the connections with its parent: all of it
  /// stays as it is.
  void leave_to_parent() noexcept;
  /// The queue and the watch end; what comes later is refused.
  void end() noexcept;
  /// Errors: as Store::require_size, which the others hear, too: they wait for this rank.
  void require_size();
  bool ends_by_call() const { return options_.lost_rank_ends == LostRankEnds::kCall; }
  /// Another rank is lost, or has failed: aborts the World for good. `end_process` is called where
  /// the program does not hear of it within its grace period.
  void lose(const std::string& why, std::function<void()> end_process);
  /// How long rank 0 keeps the store for others that have caught their errors.
  std::chrono::milliseconds patience_for_others() const;
  void abort_here(const std::string& why, int epoch, Aborter by);
  void abort_all(const std::string& disagreement, int epoch);
  /// Errors: what the interrupt check throws.
  void leave_together();
  void leave_after_abort(std::chrono::milliseconds patience);
  /// Meets everyone, however long they take as long as they live.
  void wait_for_the_last(const std::string& key);
  /// Whether every rank that has not come to `key` has beaten since `beats` were noted.
  bool missing_are_alive(const std::string& key, std::map<int, std::string>& beats);
  FailureWatch::Actions watch_actions();
  /// None where the store has gone, or is silent.
  std::optional<Boards> boards_in_time(std::function<Boards()> collect,
                                       std::chrono::milliseconds time) const;
  void publish_board(int epoch) noexcept;
  FailureRecord noticed(const std::string& why) const;
  /// What a call of the store returns; none when it fails or gives no answer soon.
  std::optional<std::string> in_time(std::function<std::string()> call) noexcept;

  const LaunchEnvironment launch_;
  const WorldOptions options_;
  const int exceptions_before_;
  const BackendRow& backend_;
  std::vector<int> everyone_;
  WatchTimes times_;
  std::shared_ptr<Store> store_;
  std::unique_ptr<FailureWatch> watch_;
  std::unique_ptr<Connections> connections_;
  std::unique_ptr<Connections> messages_;  ///< where connections_ carry no tensors of the CPU
  /// Held while the World is aborted and while it is repaired: what an abort has found of the epoch
  /// still holds when it acts. It guards no member alone: epoch_, recoveries_ and aborter_ are read
  /// without it, too.
  base::Mutex epoch_mutex_;
  std::atomic<int> epoch_{0};
  std::atomic<bool> store_is_silent_{false};
  std::atomic<int> published_epoch_{-1};
  /// As `by` of the first abort_here() of this epoch.
  std::atomic<Aborter> aborter_{Aborter::kNone};
  /// Marked once a rank is lost under LostRankEnds::kCall: there is no recovery from that.
  AbortFlag lost_;
  std::function<void()> end_process_;  ///< of the watch's thread
  std::atomic<bool> leaves_{false};
  bool drops_held_groups_ = false;  ///< as it leaves
  base::Mutex undo_mutex_;
  std::function<void()> undo_ TESSERA_GUARDED_BY(undo_mutex_);
};

}  // namespace tessera::comm
