// Gloo connections: the one door to c10d::ProcessGroupGloo.
//
// Only opened here; what goes over them is point_to_point.h. gloo.cpp alone includes
// ProcessGroupGloo.hpp: Debian's Gloo headers (libtorch brings none) are older than the Gloo inside
// libtorch and lay out some classes differently, so nothing of Gloo's own may be called, only
// c10d's.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backends/backend.h"
#include "launch/launch_environment.h"
#include "launch/store.h"

namespace tessera::comm {

inline bool gloo_built_in() { return true; }
inline DeviceFacts gloo_facts(int /*device*/) { return {}; }

/// The backend. Errors: as GlooDevice.
std::unique_ptr<Connections> open_gloo(const LaunchEnvironment& launch);

/// Groups for control messages and those of users, of which most are relayed, need few of their
/// connections: their ranks connect when they first send to each other ([Note: connections]).
/// Gloo's own lazy devices are no help: each group needs one of its own, with a port and a thread,
/// and one whose peers have left may never come out of its destructor (seen with 2.13: its loop
/// ends only when nothing is ready).
bool connects_when_used(std::string_view group_name);

/// Opens one connection; may run on a thread that no caller waits for any more.
using PairOpening = std::function<c10::intrusive_ptr<c10d::Backend>()>;

class GlooDevice;
/// What connects all ranks of a group.
struct GroupDoor {
  std::string key;  ///< in the store
  int self = 0;     ///< index of this rank
  int size = 0;
  std::chrono::milliseconds timeout{0};  ///< of the opening
};
/// `waits_for` hears for which rank (an index) Gloo waits, -1: for none. Errors: as
/// GlooDevice::connect.
c10::intrusive_ptr<c10d::Backend> connect_all(const Store& store, GlooDevice& device,
                                              const GroupDoor& door,
                                              std::shared_ptr<const AbortFlag> abort_flag,
                                              std::function<void(int index)> waits_for);

/// ChannelOptions::open_pair for the rank at index `self` of a group, whose key in an epoch is
/// key_of(epoch). What it returns gives up after the patience of a wait that begins when it is
/// made, and when the World is aborted or has been since.
std::function<PairOpening(int epoch, int peer)> pair_opener(
    std::shared_ptr<const Store> store, std::shared_ptr<GlooDevice> device,
    std::chrono::milliseconds timeout, std::shared_ptr<const AbortFlag> abort_flag, int self,
    std::function<std::string(int epoch)> key_of);

/// A socket to listen on and the thread that moves bytes, which takes no core from a thread that
/// runs (SCHED_BATCH); shared by the groups of one World.
class GlooDevice {
 public:
  /// GLOO_SOCKET_IFNAME's first interface if it is set, loopback where that reaches all ranks, else
  /// the address from which this host reaches the store. From here on the process ignores SIGPIPE,
  /// unless it has a handler of its own. Errors: kComm.
  explicit GlooDevice(const LaunchEnvironment& launch);
  ~GlooDevice();
  GlooDevice(const GlooDevice&) = delete;
  GlooDevice& operator=(const GlooDevice&) = delete;

  /// Connects to all `size` ranks that share the store. Collective. Errors: LostRank where one does
  /// not come, the store does not answer, or `aborted` says why no caller waits for it any more ("":
  /// it does not): Gloo itself waits for a rank whose address it has, though that rank has given up.
  c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout,
                                            const std::function<std::string()>& aborted);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
