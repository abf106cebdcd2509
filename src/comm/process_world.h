// State of a World, and ProcessWorld, whose ranks are processes. Private to comm/.
//
// A ProcessWorld holds the store, the watch and the connections of a backend. It ends in two
// different ways: the destructor leaves together with the others, report_failure() leaves alone.
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

/// The groups of a World, and the mark that it has failed.
struct World::State {
  base::Mutex mutex;
  base::Condition made_one;
  bool making TESSERA_GUARDED_BY(mutex) = false;
  std::map<std::string, std::shared_ptr<comm::Group>> made TESSERA_GUARDED_BY(mutex);
  /// The streams of groups on a device; keys are the groups' ranks.
  std::map<std::vector<int>, comm::Stream> streams TESSERA_GUARDED_BY(mutex);
  const std::shared_ptr<comm::AbortFlag> abort_flag = std::make_shared<comm::AbortFlag>();
  const std::shared_ptr<comm::WaitBoard> board = std::make_shared<comm::WaitBoard>();
  std::shared_ptr<comm::Store> store;  ///< none in a world of one
  std::chrono::milliseconds init_timeout{0};
  std::unique_ptr<comm::StartUpLog> start_up_log;  ///< rank 0's, during start-up
  at::Device device{at::kCPU};
  std::shared_ptr<comm::HostWaits> host_waits;  ///< none on the CPU

  /// The right of one thread to look up and make a group; other threads wait for it. The mutex is
  /// not held meanwhile: connecting takes as long as the other ranks do, which may first need an
  /// answer from another thread of this rank.
  class Making {
   public:
    /// Waits while another thread makes one. Errors: those of the interrupt check.
    Making(State& state, std::string name);
    ~Making();
    Making(const Making&) = delete;
    Making& operator=(const Making&) = delete;

    const std::shared_ptr<comm::Group>& made() const { return made_; }  ///< null: it must be made
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

/// Why a rank aborts its World before it recovers: any rank that still waits for it is to leave,
/// too.
inline constexpr const char* kRecovers = "recovers from an error of its own";
/// The reason that other ranks hear where a rank's interrupt check has thrown.
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

  /// Writes the failure key unless it exists. Returns its value; none when the store is gone or
  /// does not answer soon.
  std::optional<FailureRecord> announce_failure(const FailureRecord& failure) noexcept;
  std::optional<FailureRecord> known_failure() noexcept;
  /// The same for a rank that was stopped. Where another rank's message has aborted the World, that
  /// rank's error is still on its way: waits for it as long as messages may take.
  std::optional<FailureRecord> failure_behind() noexcept;
  /// Whether `error` says that ranks have called different things, for which the World is aborted.
  /// Every rank has that error as its own, on whichever rank it was found; a rank that is lost
  /// before the recovery is a different case.
  bool is_disagreement(const std::exception& error) const;
  /// Freezes this rank's board as it is now, though its waits end.
  void keep_board() noexcept { state_->board->freeze(); }
  /// Writes this rank's board into the store, once an epoch, for the rank that reports.
  void publish_board() noexcept;
  /// Why the run hangs or was lost, from the boards of all ranks (hang_finder.h); "" where the
  /// store does not answer. Takes as long as messages may take.
  std::string hang_report() noexcept;
  /// Implements when_refused() of comm/failure_report.h.
  void when_refused(std::function<void()> undo);
  void refused() noexcept;
  /// Waits, where this process serves the store, until the others have read what it says.
  void stay_for_readers() const noexcept;

 protected:
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const at::Device& where) override;

 private:
  /// The cause of the abort in this epoch: an error of this rank, a message of another rank, or a
  /// watch that found that ranks disagree.
  enum class Aborter : std::uint8_t { kNone, kSelf, kOther, kDisagreement };
  /// For a child of fork(), which has none of the threads and shares the connections with its
  /// parent: leaves everything as it is.
  void leave_to_parent() noexcept;
  /// Ends the queue and the watch; later calls are refused.
  void end() noexcept;
  /// Errors: as Store::require_size. The others hear it, too: they wait for this rank.
  void require_size();
  bool ends_by_call() const { return options_.lost_rank_ends == LostRankEnds::kCall; }
  /// Aborts the World for good, since another rank is lost or has failed. `end_process` is called
  /// where the program does not react within its grace period.
  void lose(const std::string& why, std::function<void()> end_process);
  /// How long rank 0 keeps the store for ranks that have caught their errors.
  std::chrono::milliseconds patience_for_others() const;
  void abort_here(const std::string& why, int epoch, Aborter by);
  void abort_all(const std::string& disagreement, int epoch);
  /// Errors: those of the interrupt check.
  void leave_together();
  void leave_after_abort(std::chrono::milliseconds patience);
  /// Waits for every rank, for any time, as long as all live.
  void wait_for_the_last(const std::string& key);
  /// Whether every rank that has not come to `key` has beaten since `beats` were noted.
  bool missing_are_alive(const std::string& key, std::map<int, std::string>& beats);
  FailureWatch::Actions watch_actions();
  /// Returns none where the store is gone or does not answer.
  std::optional<Boards> boards_in_time(std::function<Boards()> collect,
                                       std::chrono::milliseconds time) const;
  void publish_board(int epoch) noexcept;
  FailureRecord noticed(const std::string& why) const;
  /// Returns what a call of the store returns; none when it fails or does not answer soon.
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
  /// Held while the World is aborted and while it is repaired: what an abort has found about the
  /// epoch still holds when it acts. It guards no member by itself: epoch_, recoveries_ and
  /// aborter_ are read without it, too.
  base::Mutex epoch_mutex_;
  std::atomic<int> epoch_{0};
  std::atomic<bool> store_is_silent_{false};
  std::atomic<int> published_epoch_{-1};
  /// The `by` of the first abort_here() of this epoch.
  std::atomic<Aborter> aborter_{Aborter::kNone};
  /// Marked once a rank is lost under LostRankEnds::kCall: then no recovery is possible.
  AbortFlag lost_;
  std::function<void()> end_process_;  ///< called by the watch's thread
  std::atomic<bool> leaves_{false};
  bool drops_held_groups_ = false;  ///< set when it leaves
  base::Mutex undo_mutex_;
  std::function<void()> undo_ TESSERA_GUARDED_BY(undo_mutex_);
};

}  // namespace tessera::comm
