// World: the ranks of one training run as one of them sees them. Everything that communicates hangs
// on a World object; there is no process-global state, so ranks can be threads and several Worlds
// can live in one process.
//
// Made by World::connect in a process that a launcher started, by World::from_store over a store
// that the program has already, by launch() for local ranks, or by launch_threads() for ranks as
// threads of one process. Next: mesh.h, shard.h, interrupt.h.
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

/// As c10::intrusive_ptr<c10d::Store>.
using StorePtr =
    c10::intrusive_ptr<c10d::Store, c10::detail::intrusive_target_default_null_type<c10d::Store>>;

/// The failure watch ends this on its rank when another rank is lost, or has failed.
enum class LostRankEnds : std::uint8_t {
  kProcess,  ///< the process, at once, by _exit: nothing of the program runs any more
  /// The call that waits, or the next one, which throws kComm: the program's handlers and
  /// destructors run. It ends the process only where the program makes no call within
  /// WorldOptions::grace_period.
  kCall,
};

struct WorldOptions {
  std::string backend = "auto";  ///< "auto" (what carries `device`), "gloo" (cpu), "nccl" (cuda)
  /// Where tensors of sharded modules and of collectives are: "cpu", or "cuda", of which each local
  /// rank takes the device of its number, or the only one that is visible; "cuda:0": all take that;
  /// "auto": "cuda" where libtorch has it, its driver and a device are there, else "cpu".
  std::string device = "cpu";
  std::chrono::milliseconds init_timeout = std::chrono::seconds(300);
  std::chrono::milliseconds timeout = std::chrono::seconds(100);  ///< of every collective
  std::string
      master_addr;      ///< where MASTER_ADDR is not set; "" = this host, if all ranks are on one
  int master_port = 0;  ///< where MASTER_PORT is not set; 0 = derived from the launcher's job
  /// Exchange what every rank is about to issue before each collective and name both where they
  /// differ, over Gloo under every backend; without it a disagreement is found once both wait (Gloo),
  /// or not (NCCL, whose operations meet by their order alone). Also on with
  /// TESSERA_COMPARE_ENTRIES=1.
  bool compare_entries = false;
  /// A wait this long makes the failure watch compare what ranks have issued.
  std::chrono::milliseconds blocked_after = std::chrono::seconds(2);
  /// The same on every rank: only ranks with kCall are told that an awaited rank has left.
  LostRankEnds lost_rank_ends = LostRankEnds::kProcess;
  /// Time from the notice of a lost rank to the end of a process that has thrown no error of it and
  /// has not closed its World: of LostRankEnds::kCall alone.
  std::chrono::milliseconds grace_period = std::chrono::seconds(5);
};

/// Which errors end a process. An exception that a call throws ends none: it can be caught on every
/// rank, and recover() makes the World usable again. That holds for ranks that call different
/// things, in another order or not at all, over every backend. The failure watch of a process that
/// World::connect or launch() made ends the process, with exit code 1 and the reason on stderr,
/// where no call can throw in time:
/// - another rank is lost (killed, stopped, without a sign of life for 6 s, or the store went with
///   rank 0), or has left with an error of its own;
/// - a collective on this rank's device does not end within WorldOptions::timeout;
/// - ranks were found to call different things, and 5 s later this one has not thrown that: it has
///   made no call since, or its call does not return.
/// With WorldOptions::lost_rank_ends = kCall the first two abort the World, so that this rank's call
/// throws the same text as kComm, and end the process where it makes no call within grace_period;
/// such a World does not recover. A wait for a rank that has closed its World throws, too.
/// Ranks that are threads are never ended.
///
/// In a child of fork() a World of several ranks is of no use and does no harm: its collectives
/// throw kUsage; close(), abort() and its destructor do nothing.
class World : public std::enable_shared_from_this<World> {
 public:
  /// Joins the run that the environment describes (torchrun, Open MPI, PMI, Slurm, own spawn), or
  /// makes a world of one. Collective. Starts the failure watch when there are other processes. The
  /// last reference to it waits until the others let go of theirs, unless the run has failed. With
  /// Gloo the process ignores SIGPIPE from then on, unless it handles it: a lost rank is an error.
  /// Errors: kUsage for contradictory variables, and for a device that is not there; kConfig for a
  /// backend that does not carry its tensors; kComm when the others do not come in time.
  static std::shared_ptr<World> connect(const WorldOptions& options = {});
  /// Joins the ranks that share `store` (of torch.distributed's default process group, a TCPStore, a
  /// FileStore, or a HashStore between threads), which the caller keeps: ranks of any launcher, or
  /// of none. Its keys are under a prefix of its own, counted by rank, so that Worlds over one store,
  /// one after the other or at the same time, do not meet: every rank makes them in the same order.
  /// It takes connections of its own by clone(); a store that has none (a wrapper written in Python)
  /// is shared, which is safe since no call on it waits. local_rank() is the launcher's where the
  /// environment describes this rank, else that of `rank` on its host. Collective; otherwise as
  /// connect(), also of one rank, which does not ask the store. Errors: kUsage for a rank outside of
  /// `size`, and for ranks that give different sizes; as connect().
  static std::shared_ptr<World> from_store(const StorePtr& store, int rank, int size,
                                           const WorldOptions& options = {});
  /// A world of one, whatever the environment says: of a process that works alone, also where a
  /// launcher has started others beside it.
  static std::shared_ptr<World> of_one(const WorldOptions& options = {});

  virtual ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// Leaves together with the others, as the destructor does: waits until they close theirs, unless
  /// the run has failed. Afterwards collectives, group() and fully_shard throw kUsage "the World is
  /// closed"; objects of it can still be destroyed, in any order. Does nothing the second time.
  /// Collective, unless aborted. Errors: what the interrupt check throws while it waits
  /// (interrupt.h), behind which it is closed.
  virtual void close() = 0;
  /// Leaves alone: tells the others that this rank has failed, for which each ends or throws "rank
  /// R: why" (WorldOptions::lost_rank_ends) within a second or two, and closes. Waits about a second
  /// at most, on rank 0, which may hold the store. Not collective. Does nothing once closed.
  virtual void close_failed(const std::string& why) = 0;
  bool closed() const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  /// Of this rank, by number (c10/core/Device.h); on the CPU without one.
  c10::Device device() const;
  /// For a thread of the user's own that computes for this rank on a device: that becomes its
  /// current one, and its backwards stay on it, as hooks and streams of sharded modules want it.
  /// Whoever made the World, and the threads of launch_threads(), have done it.
  void attach_thread() const;
  /// "gloo", "nccl", "in-process", "none" (world of one).
  virtual std::string backend() const = 0;

  /// A mesh over all ranks; of a dense shape alone, or of both readings. Errors: as Mesh's.
  Mesh mesh(const MeshShapes& shapes);

  /// Collectives (group.h) among all ranks. Collective at the first call. Errors: kComm.
  Group group();

  /// The group of the ranks (world numbers, ascending) that contain this one. `purpose` keeps
  /// groups of the same ranks apart ("gather", "reduce", "control"): each has its own channel and
  /// is issued to from one thread. Those for messages ("data", "user", "... control") connect two
  /// ranks when that is first needed. Collective among the members, made once, then cached. A
  /// single rank needs no others. Errors: kUsage for ranks that are not ascending, not in the
  /// world, or without this one; kComm.
  std::shared_ptr<comm::Group> group(const std::vector<int>& ranks, std::string_view purpose);
  /// All ranks, for control messages from the rank's own thread.
  comm::Group& control();
  /// The one queue of sharding collectives.
  comm::IssueQueue& queue() { return *queue_; }

  /// Before the first step ranks may have unequal work (one hashes data, another verifies more):
  /// from here on a wait lasts as long as the larger of init_timeout and timeout. A lost rank is
  /// noticed as soon as in a step. On every rank alike.
  void begin_start_up();
  /// Nobody goes on before all are here. Collective. Errors: kComm.
  void end_start_up();
  /// What this rank is busy with: in the errors of those that wait for it, and in its log. "" = it
  /// waits, too. Outside of a start-up nothing happens. Errors: kComm when the store has gone.
  void work_at(const std::string& what);

  /// Marks the run as failed: waits and later collectives throw kComm, here at once, on the other
  /// ranks as soon as they learn of it. Not collective. Threads: any.
  void abort(const std::string& why) { abort_epoch(recoveries(), why); }
  /// The same for what went wrong when recoveries() was `epoch`, by a thread that may come late:
  /// once the World was recovered, nothing happens. Threads: any.
  virtual void abort_epoch(std::uint64_t epoch, const std::string& why) = 0;
  bool aborted() const;
  [[deprecated("abort()")]] void poison(const std::string& why) { abort(why); }
  [[deprecated("aborted()")]] bool poisoned() const { return aborted(); }
  /// Makes an aborted World usable again after every rank has caught its error: groups stay valid
  /// and start anew, collectives under way are lost. Collective, of all ranks: one that is not
  /// aborted yet is aborted, so that the others leave their waits; a rank that is lost meanwhile
  /// ends the process as at any other time. Not over NCCL. Errors: kComm.
  virtual void recover() = 0;
  /// How often that was done: the same on every rank.
  std::uint64_t recoveries() const { return recoveries_; }
  /// The next name for what is sharded, "model 2". All ranks shard in one order, so it is the same
  /// on every one; after a failure that only some had come to, from the recovery on.
  std::string next_model_name(std::uint64_t others = 0) {
    const auto now = recoveries();
    models_ = std::max(models_named(), others);
    named_at_ = now;
    const auto name = "model " + std::to_string(++models_);
    return now == 0 ? name : name + " since recovery " + std::to_string(now);
  }
  /// So far; `others` above: what another rank says, where ranks hold different numbers of units.
  std::uint64_t models_named() const { return named_at_ == recoveries() ? models_ : 0; }
  /// Whether ranks may have counted differently: there was a pipeline, whose stages differ.
  bool had_stages() const { return had_stages_; }
  void note_stages() { had_stages_ = true; }

 protected:
  struct State;

  World(int rank, int size, int local_rank, const WorldOptions& options);
  /// On `device`, whatever options.device says.
  World(int rank, int size, int local_rank, c10::Device device, const WorldOptions& options);
  /// `name` is the same on all members and different for different groups; at least two ranks.
  /// `device`: of its tensors.
  virtual std::shared_ptr<comm::Group> make_group(const std::vector<int>& ranks,
                                                  const std::string& name,
                                                  const c10::Device& device) = 0;
  /// Derived classes call this first in their destructors: the queue's thread uses their groups.
  /// The queue itself stays, for a failure watch that still runs.
  void stop_queue();

  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  std::atomic<std::uint64_t> recoveries_ = 0;  ///< counted by derived classes
  std::uint64_t models_ = 0;                   ///< that were named since recovery named_at_
  std::uint64_t named_at_ = 0;
  bool had_stages_ = false;
  std::atomic<bool> closed_ = false;
  std::unique_ptr<State> state_;  ///< groups, abort flag
  std::unique_ptr<comm::IssueQueue> queue_;
};

/// Runs `body` as `nproc` local ranks, each a process of its own, and returns the exit code for
/// main(). In a process that a launcher already started (or in a spawned rank) it runs `body` once,
/// as that rank. Otherwise it starts this very program again nproc times (exec, before any libtorch
/// call), waits, and prints a failing rank's error last ("rank R: ..."). Call it first in main(),
/// while the process has one thread. A rank whose body throws reports the error, sets the failure
/// key and leaves without destroying groups ([Note: failure]). Where this host has fewer CUDA
/// devices than ranks to start, the device "auto" is the CPU for all of them, and "cuda" is refused;
/// over gloo they may share one device.
int launch(int nproc, const std::function<void(World&)>& body, const WorldOptions& options = {});

/// Whether this process is a rank already: of a launcher, or spawned.
bool launched();

/// How the ranks of launch_threads() talk.
enum class ThreadBackend {
  kInProcess,  ///< real data through memory; labels of every collective compared over ranks
  kGloo,       ///< real Gloo over loopback
  kNccl,       ///< NCCL: each rank on a CUDA device of its own, messages of control through memory
};

/// Runs `body` on `ranks` threads of this process, one rank each, and rethrows the first error (by
/// time); a rank that throws aborts the others. Each thread computes with cores / ranks threads
/// (at::set_num_threads). Meant for tests and for trying layouts: libtorch's default generator and
/// its thread pool are shared. Errors: kUsage for kNccl in a build without it; what `body` throws.
void launch_threads(int ranks, ThreadBackend backend, const std::function<void(World&)>& body,
                    const WorldOptions& options = {});

}  // namespace tessera
