// World: the ranks of one training run, as one of them sees them.
//
// All communication belongs to a World object. There is no process-global state, so ranks can be
// threads, and a process can have several Worlds. World::connect() makes one in a process that a
// launcher started, World::from_store() over an existing store, launch() for local processes, and
// launch_threads() for ranks as threads of one process. Next: mesh.h, shard.h, interrupt.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/mesh.h"

namespace c10 {
struct Device;
template <class TTarget, class NullType>
class intrusive_ptr;
namespace detail {
template <class TTarget>
struct intrusive_target_default_null_type;
}  // namespace detail
}  // namespace c10

namespace c10d {
class Store;
}

namespace tessera {

namespace comm {
class Group;
class IssueQueue;
}  // namespace comm

/// c10::intrusive_ptr<c10d::Store>, without its header.
using StorePtr =
    c10::intrusive_ptr<c10d::Store, c10::detail::intrusive_target_default_null_type<c10d::Store>>;

/// The consequence on a rank when another rank is lost or has failed.
enum class LostRankEnds : std::uint8_t {
  kProcess,  ///< the process ends at once, by _exit(): no handler or destructor runs
  /// The waiting call, or the next one, throws kComm: the program's handlers and destructors run.
  /// The process ends only where the program makes no call within WorldOptions::grace_period.
  kCall,
};

/// Options of a World.
struct WorldOptions {
  std::string backend = "auto";  ///< "gloo" (cpu), "nccl" (cuda), or "auto" (the one for `device`)
  /// The device of the tensors of sharded modules and of collectives: "cpu"; "cuda", where each
  /// local rank takes the device of its number, or the only visible one; "cuda:0" for all ranks;
  /// "auto", which is "cuda" where libtorch, the driver and a device support it, else "cpu".
  std::string device = "cpu";
  /// Bound of joining, and of waits in a start-up.
  std::chrono::milliseconds init_timeout = std::chrono::seconds(300);
  std::chrono::milliseconds timeout = std::chrono::seconds(100);  ///< bound of every collective
  std::string master_addr;  ///< used without MASTER_ADDR; "" = this host, if all ranks are on one
  int master_port = 0;      ///< used without MASTER_PORT; 0 = derived from the launcher's job
  /// Whether ranks compare their next operation before each collective, over Gloo under every
  /// backend, so that an error names both where they differ. Without it a difference is found once
  /// both ranks wait (Gloo) or not at all (NCCL, which matches operations by order alone).
  /// TESSERA_COMPARE_ENTRIES=1 turns it on too.
  bool compare_entries = false;
  /// Length of a wait after which the failure watch compares the ranks' operations.
  std::chrono::milliseconds blocked_after = std::chrono::seconds(2);
  /// The consequence of a lost rank. The same on every rank: only ranks with kCall learn that a
  /// rank for which they wait has left.
  LostRankEnds lost_rank_ends = LostRankEnds::kProcess;
  /// Time, with LostRankEnds::kCall, from the notice of a lost rank to the end of a process that
  /// has neither thrown an error of it nor closed its World.
  std::chrono::milliseconds grace_period = std::chrono::seconds(5);
};

/// The ranks of a run.
///
/// Which errors end a process: an exception of a call does not. It can be caught on every rank, and
/// recover() makes the World usable again, over every backend but NCCL, even where ranks make
/// different calls, in another order or not at all. But in a process that World::connect() or
/// launch() made,
/// the failure watch ends the process, with exit code 1 and the reason on stderr, where no call can
/// throw in time:
/// - another rank is lost (killed, stopped, without a sign of life for 6 s, or the store went with
///   rank 0), or has left with an error of its own;
/// - a collective on this rank's device does not end within WorldOptions::timeout;
/// - ranks make different calls, and 5 s after this was found this rank has not thrown the error,
///   because it makes no call or its call does not return.
///
/// With WorldOptions::lost_rank_ends = kCall the first two abort the World instead: this rank's
/// call throws the same text as kComm, and the process ends only where it makes no call within
/// grace_period. Such a World does not recover. A wait for a rank that has closed its World throws
/// too. A rank that is a thread never ends its process.
///
/// In a child of fork() a World of several ranks is unusable and harmless: its collectives throw
/// kUsage; close(), abort() and its destructor do nothing.
class World : public std::enable_shared_from_this<World> {
 public:
  /// Joins the run that the environment describes (torchrun, Open MPI, PMI, Slurm, launch()), or
  /// makes a world of one. Starts the failure watch where there are other processes. The destructor
  /// of the last reference waits for those of the other ranks, unless the run has failed. With Gloo
  /// the process ignores SIGPIPE from then on, unless it handles it, so that a lost rank is an
  /// error. Collective. Errors: kUsage for contradictory variables and for a missing device;
  /// kConfig for a backend that does not carry tensors of the device; kComm where the others do not
  /// come in time.
  static std::shared_ptr<World> connect(const WorldOptions& options = {});
  /// Joins the ranks that share `store`, which the caller keeps: that of torch.distributed's
  /// default process group, a TCPStore, a FileStore, or a HashStore between threads. Ranks may come
  /// from any launcher or none. Each World has its own prefix of keys, numbered in the order in
  /// which ranks make them, which is the same on every rank; so several Worlds can share a store.
  /// The World makes connections by clone(). A store without clone() (a wrapper written in Python)
  /// is shared, which is safe since no call on it waits. local_rank() is the launcher's where the
  /// environment describes this rank, else the index of `rank` on its host. A world of one does not
  /// use the store. Collective. Errors: as connect(); kUsage for a rank outside of `size`, and for
  /// sizes that differ between ranks.
  static std::shared_ptr<World> from_store(const StorePtr& store, int rank, int size,
                                           const WorldOptions& options = {});
  /// Makes a world of one in any environment, for a process that works alone.
  static std::shared_ptr<World> of_one(const WorldOptions& options = {});

  virtual ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// Leaves the run together with the other ranks, as the destructor does: waits until they close
  /// their Worlds, unless the run has failed. Afterwards collectives, group() and fully_shard()
  /// throw kUsage "the World is closed"; objects of the World can still be destroyed, in any order.
  /// Does nothing the second time. Collective, unless aborted. Errors: those of the interrupt check
  /// (interrupt.h), after which the World is closed.
  virtual void close() = 0;
  /// Leaves the run alone: tells the other ranks that this one has failed, and closes. Each of them
  /// ends or throws "rank R: why" (WorldOptions::lost_rank_ends) within a second or two. Rank 0,
  /// which may hold the store, waits about a second. Does nothing once closed. Not collective.
  virtual void close_failed(const std::string& why) = 0;
  bool closed() const;  ///< whether close() or close_failed() was called

  int rank() const { return rank_; }              ///< number of this rank, from 0
  int size() const { return size_; }              ///< number of ranks
  int local_rank() const { return local_rank_; }  ///< number of this rank on its host, from 0
  /// Returns the device of this rank with its number (c10/core/Device.h); the CPU has none.
  c10::Device device() const;
  /// Prepares a thread of the program to compute for this rank on its device: the device becomes
  /// current, and backwards stay on this thread, as sharded modules need it. The thread that made
  /// the World and those of launch_threads() are prepared.
  void attach_thread() const;
  /// Returns "gloo", "nccl", "in-process", or "none" (a world of one).
  virtual std::string backend() const = 0;

  /// Makes a mesh over all ranks, of a dense shape alone or of both readings. Errors: as Mesh's.
  Mesh mesh(const MeshShapes& shapes);

  /// Returns the group (group.h) of all ranks. Collective at the first call. Errors: kComm.
  Group group();

  /// Returns the group of `ranks` (world numbers, ascending), which include this one. `purpose`
  /// separates groups of the same ranks ("gather", "reduce", "control"): each has its own channel,
  /// and one thread issues to it. Groups for messages ("data", "user", "... control") connect two
  /// ranks when that is first needed. The group is made once, then cached. Collective among the
  /// members. Errors: kUsage for ranks that are not ascending, not in the world, or do not include
  /// this one; kComm.
  std::shared_ptr<comm::Group> group(const std::vector<int>& ranks, std::string_view purpose);
  /// Returns the group of all ranks for control messages from the rank's thread.
  comm::Group& control();
  /// Returns the queue of all sharding collectives.
  comm::IssueQueue& queue() { return *queue_; }

  /// Begins a phase in which ranks may have unequal work (one hashes data, another verifies more):
  /// a wait lasts up to the larger of init_timeout and timeout. A lost rank is noticed as fast as
  /// in a step. Call it on every rank.
  void begin_start_up();
  /// Ends the phase and waits for all ranks. Collective. Errors: kComm.
  void end_start_up();
  /// Names this rank's work in the start-up, for the errors of ranks that wait for it and for its
  /// log; "" = it waits too. Does nothing outside of a start-up. Errors: kComm where the store has
  /// gone.
  void work_at(const std::string& what);

  /// Marks the run as failed: waits and later collectives throw kComm, on this rank at once, on the
  /// others as soon as they learn of it. Not collective. Threads: any.
  void abort(const std::string& why) { abort_epoch(recoveries(), why); }
  /// The same for a failure at the time when recoveries() was `epoch`; does nothing once the World
  /// has recovered since. Threads: any.
  virtual void abort_epoch(std::uint64_t epoch, const std::string& why) = 0;
  bool aborted() const;  ///< whether the run is marked as failed
  /// The old name of abort(); deprecated.
  [[deprecated("abort()")]] void poison(const std::string& why) { abort(why); }
  /// The old name of aborted(); deprecated.
  [[deprecated("aborted()")]] bool poisoned() const { return aborted(); }
  /// Makes an aborted World usable again after every rank has caught its error. Groups stay valid;
  /// pending collectives are lost. A rank that is not aborted yet is aborted, so that it leaves its
  /// wait. A rank that is lost meanwhile ends the process as at any other time. Not over NCCL.
  /// Collective. Errors: kComm.
  virtual void recover() = 0;
  /// Returns the number of recoveries, the same on every rank.
  std::uint64_t recoveries() const { return recoveries_; }
  /// Returns the name of the next sharded model, "model 2". All ranks shard in one order, so it is
  /// the same on every rank; after a failure that only some ranks met, it is so from the recovery
  /// on. `others` is the highest count of another rank, where ranks hold different numbers of
  /// units.
  std::string next_model_name(std::uint64_t others = 0) {
    const auto now = recoveries();
    models_ = std::max(models_named(), others);
    named_at_ = now;
    const auto name = "model " + std::to_string(++models_);
    return now == 0 ? name : name + " since recovery " + std::to_string(now);
  }
  /// Returns the number of names given since the last recovery.
  std::uint64_t models_named() const { return named_at_ == recoveries() ? models_ : 0; }
  /// Returns whether there was a pipeline, whose stages may have named different numbers of models.
  bool had_stages() const { return had_stages_; }
  /// Notes that there is a pipeline.
  void note_stages() { had_stages_ = true; }

 protected:
  struct State;

  World(int rank, int size, int local_rank, const WorldOptions& options);
  /// The same on `device` in place of options.device.
  World(int rank, int size, int local_rank, c10::Device device, const WorldOptions& options);
  /// Makes a group of at least two ranks for tensors on `device`. `name` is the same on all members
  /// and differs between groups.
  virtual std::shared_ptr<comm::Group> make_group(const std::vector<int>& ranks,
                                                  const std::string& name,
                                                  const c10::Device& device) = 0;
  /// Stops the queue's thread, which uses the groups; derived classes call it first in their
  /// destructors. The queue itself stays, for a failure watch that still runs.
  void stop_queue();

  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  std::atomic<std::uint64_t> recoveries_ = 0;  ///< counted by derived classes
  std::uint64_t models_ = 0;                   ///< number of models named since recovery named_at_
  std::uint64_t named_at_ = 0;
  bool had_stages_ = false;
  std::atomic<bool> closed_ = false;
  std::unique_ptr<State> state_;  ///< groups, abort flag
  std::unique_ptr<comm::IssueQueue> queue_;
};

/// Runs `body` on `nproc` local ranks, one process each, and returns the exit code for main(). In a
/// process that a launcher or launch() has started it runs `body` once, as that rank. Otherwise it
/// starts this program again nproc times (exec, before any libtorch call), waits, and prints the
/// error of a failing rank last ("rank R: ..."). Call it first in main(), while the process has one
/// thread. A rank whose body throws reports the error, sets the failure key and leaves without
/// destroying groups ([Note: failure]). Where this host has fewer CUDA devices than ranks, the
/// device "auto" is the CPU for all ranks, and "cuda" is refused; over gloo ranks may share one
/// device.
int launch(int nproc, const std::function<void(World&)>& body, const WorldOptions& options = {});

/// Returns whether a launcher or launch() has started this process as a rank.
bool launched();

/// How the ranks of launch_threads() communicate.
enum class ThreadBackend {
  kInProcess,  ///< through memory; the labels of every collective are compared over ranks
  kGloo,       ///< Gloo over loopback
  kNccl,       ///< NCCL, with one CUDA device for each rank, and control messages through memory
};

/// Runs `body` on `ranks` threads of this process, one rank each, and rethrows the first error (by
/// time); a rank that throws aborts the others. Each thread computes with cores / ranks threads
/// (at::set_num_threads). It is meant for tests and for trying layouts, since the ranks share
/// libtorch's default generator and thread pool. Errors: kUsage for kNccl in a build without it;
/// those of `body`.
void launch_threads(int ranks, ThreadBackend backend, const std::function<void(World&)>& body,
                    const WorldOptions& options = {});

}  // namespace tessera
