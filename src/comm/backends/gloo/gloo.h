// Gloo connections: all use of c10d::ProcessGroupGloo.
//
// This file only opens connections; point_to_point.h sends over them. Only gloo.cpp includes
// ProcessGroupGloo.hpp: Debian's Gloo headers (libtorch brings none) are older than the Gloo inside
// libtorch and lay out some classes differently, so only functions of c10d may be called, and none
// of Gloo itself.
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

/// Whether the ranks of a group connect only when they first send to each other ([Note:
/// connections]). True for groups of control messages and those of users: most of their messages
/// are relayed and need few connections. Gloo's own lazy devices do not serve: each group would
/// need its own device, with a port and a thread, and the destructor of a device whose peers have
/// left may never return (seen with 2.13: its loop ends only when nothing is ready).
bool connects_when_used(std::string_view group_name);

/// Opens one connection; may run on a thread for which no caller waits any more.
using PairOpening = std::function<c10::intrusive_ptr<c10d::Backend>()>;

class GlooDevice;
/// The parameters of connect_all().
struct GroupDoor {
  std::string key;  ///< in the store
  int self = 0;     ///< index of this rank
  int size = 0;
  std::chrono::milliseconds timeout{0};  ///< of the opening
};
/// Connects all ranks of a group. `waits_for` is told the index of the rank for which Gloo waits,
/// -1: none. Errors: as GlooDevice::connect.
c10::intrusive_ptr<c10d::Backend> connect_all(const Store& store, GlooDevice& device,
                                              const GroupDoor& door,
                                              std::shared_ptr<const AbortFlag> abort_flag,
                                              std::function<void(int index)> waits_for);

/// Makes ChannelOptions::open_pair for the rank at index `self` of a group, whose key in an epoch
/// is key_of(epoch). The opening that it returns gives up after the patience of a wait that begins
/// when it is made, and when the World is aborted or has been since.
std::function<PairOpening(int epoch, int peer)> pair_opener(
    std::shared_ptr<const Store> store, std::shared_ptr<GlooDevice> device,
    std::chrono::milliseconds timeout, std::shared_ptr<const AbortFlag> abort_flag, int self,
    std::function<std::string(int epoch)> key_of);

/// A listening socket, and the thread that moves bytes, which takes no core from a running thread
/// (SCHED_BATCH). The groups of one World share it.
class GlooDevice {
 public:
  /// Binds to GLOO_SOCKET_IFNAME's first interface if that is set, to loopback where that reaches
  /// all ranks, else to the address from which this host reaches the store. From then on the
  /// process ignores SIGPIPE, unless it has a handler. Errors: kComm.
  explicit GlooDevice(const LaunchEnvironment& launch);
  ~GlooDevice();
  GlooDevice(const GlooDevice&) = delete;
  GlooDevice& operator=(const GlooDevice&) = delete;

  /// Connects to all `size` ranks that share the store. Collective. Errors: LostRank where a rank
  /// does not come, the store does not answer, or `aborted` returns why no caller waits any more
  /// (else ""). The last is needed because Gloo waits for a rank whose address it has, though that
  /// rank has given up.
  c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout,
                                            const std::function<std::string()>& aborted);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
